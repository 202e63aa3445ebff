import sys

from ccq.cli import main

sys.exit(main())
