#!/usr/bin/env bash
# Tier 6 of the study (docs/study.md): cleaning put into a finished model, against the same model trained on without it:
#   bash runs/study_continue.sh ROW SEED DATA OUT
# ROW is gla_unit or gated_deltanet; runs/study_row.sh has left its model in OUT/ROW-seedSEED/model. Three runs of 25M
# tokens follow, OUT/continued/ROW-READ-seedSEED, where READ is none, paper or projected. What is finished is not run again.
set -eu
row=$1 seed=$2 data=$3 out=$4
ccq=${CCQ:-ccq}
case $row in
  gla_unit) rate=1e-3 ;;
  gated_deltanet) rate=2e-3 ;;
  *) echo "expected gla_unit or gated_deltanet, got $row" >&2; exit 2 ;;
esac
from=$out/$row-seed$seed/model
begin=$out/continued/begin/$row-seed$seed
mkdir -p "$out/continued/begin"
[ -e "$begin-paper" ] || $ccq convert "$from" "$begin-paper" --clean
[ -e "$begin-projected" ] ||
  $ccq convert "$from" "$begin-projected" --clean --gate-init 0.5 --step projected --covariance-decay backbone
for read in none paper projected; do
  model=$begin-$read
  [ $read != none ] || model=$from
  $ccq train "${row}_nano" --init "$model" --run-dir "$out/continued/$row-$read-seed$seed" --seed $((1000 + seed)) \
    --steps 763 --optimizer.warmup 38 --optimizer.lr $rate --data.path "$data/needles" --data.valid-path "$data/valid" \
    --runtime.workers 1 --runtime.sample-every 0 --runtime.checkpoint-every 100000 --runtime.no-tensorboard
done
