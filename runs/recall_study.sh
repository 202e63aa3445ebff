#!/usr/bin/env bash
# Tier 4 of the study (docs/study.md), recall, on one GPU:
#   bash runs/recall_study.sh OUT
# Each task: every row at each rate (and weight decay) with seed 0, then three other seeds at the best of them. Every row
# has a convolution of 4 over q, k and v, as the study says. What is finished is not run again.
set -eu
out=$1
ccq=${CCQ:-ccq}
rows=gla_unit,ccq_gla,gla_projected,gla_projected_decay,gla_projected_twice
rows+=,gated_deltanet,ccq_gated_deltanet,gated_deltanet_projected_decay
sweep() { # TASK FOLDER OPTIONS...
  local task=$1 folder=$2
  shift 2
  for tier in rows seeds; do
    $ccq sweep "$task" --tier $tier --rows "$rows" --out "$out/$folder" --set model.conv_size=4 "$@"
  done
}
for noise in 0.2 0.4 0.6 0.8; do
  sweep mad "mad_noisy_$noise" --set data.noise="$noise"
done
sweep mad mad_fuzzy --size mad-fuzzy
sweep mqar mqar_overwrite --size mqar-overwrite
for size in mqar64 mqar mqar256; do
  sweep mqar "$size" --size "$size"
done
