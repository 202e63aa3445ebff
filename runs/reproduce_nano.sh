#!/usr/bin/env bash
# The paper at nano scale, as far as one GPU gets in minutes: the commands behind benchmarks/results and docs/results.md.
# Every part may be stopped and started again; it goes on with what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

# A. Recall (MQAR) at width 128: 16 rows x 4 learning rates x 2,000 steps, one row three times with one seed; then six rows
#    x 3 other seeds x 10,000 steps at the rates chosen on validation samples. About 12 minutes on one H200.
ccq sweep mqar --tier rows --workers 8 --out runs/mqar
ccq sweep mqar --tier seeds --workers 6 --out runs/mqar
cp runs/mqar/mqar_rows.json runs/mqar/mqar_seeds.json benchmarks/results/
