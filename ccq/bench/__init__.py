"""`ccq bench`: what the operator costs on a GPU, beside its backbone and beside the floor."""
