#!/usr/bin/env bash
# One run of the study (docs/study.md), from the choice of its rate to its results:
#   bash runs/study_row.sh ROW SEED DATA OUT
# ROW is a system of ccq/systems.toml; GLA's rows get a convolution of 4. DATA holds needles/ and valid/ of
# runs/prepare_nano.sh. OUT/requests holds what all models are asked, made once, where the evaluation data is:
#   ccq eval MODEL --suite niah --stage requests --sizing ruler --lengths 1024,2048,4096,8192 --limit 100 --keys odd
#   ccq eval MODEL --suite length --stage requests --lengths 4096,16384 --limit 20      (both with --data, --out OUT)
# The rate is the best of three after 25M tokens with seed 1000. SEED=sweep stops there. RATE=2e-3 skips the choice, and
# REPEAT=1 runs a seed once more, beside the first. TIER=400m trains for four epochs, TIER=micro a larger model; their
# runs lie in OUT/400m and OUT/micro. TIER=pico RATE=3e-3 trains what may ship, on DATA/train and DATA/valid of
# runs/prepare_pico.sh (its requests: niah --lengths 512,1024,2048,4096, and length --lengths 2048,4096); its runs lie in
# OUT/pico. ONLY=train leaves the evaluation for another call. What is finished is not run again. runs/study_queue.py
# takes many rows.
set -eu
row=$1 seed=$2 data=$3 out=$4
ccq=${CCQ:-ccq}
text=needles
[ "${TIER:-}" != pico ] || text=train
common=(--data.path "$data/$text" --data.valid-path "$data/valid" --runtime.workers 1 --runtime.sample-every 0
  --runtime.checkpoint-every 100000 --runtime.no-tensorboard)
case $row in *gla*) common+=(--model.conv-size 4) ;; esac
rates=(1e-3 2e-3 4e-3)
if [ "$seed" = sweep ]; then
  pids=()
  for lr in "${rates[@]}"; do # side by side: one alone leaves most of a GPU idle
    [ -e "$out/sweep/$row-$lr/checkpoints/step-00000763" ] || {
      $ccq train "${row}_nano" --run-dir "$out/sweep/$row-$lr" --seed 1000 --steps 763 --optimizer.warmup 38 \
        --optimizer.lr "$lr" "${common[@]}" &
      pids+=($!)
    }
  done
  for pid in ${pids[@]+"${pids[@]}"}; do wait "$pid"; done
  exit
fi
rate=${RATE:-$(python3 - "$out/sweep/$row" "${rates[@]}" <<'P'
import json, math, sys
def loss(lr):  # after the last step; null where the run diverged
    found = [r["valid_loss"] for r in map(json.loads, open(f"{sys.argv[1]}-{lr}/log.jsonl")) if "valid_loss" in r]
    return math.inf if found[-1] is None else found[-1]
print(min(sys.argv[2:], key=loss))
P
)}
run=$out/${TIER:+$TIER/}$row-seed$seed${REPEAT:+-repeat$REPEAT}
size=nano
case ${TIER:-} in
  400m) common+=(--steps 12208 --optimizer.warmup 610) ;;
  micro) size=micro rate=$(python3 -c "print(float('$rate') * 2 / 3)") ;;
  pico) size=pico ;;
  ?*) echo "TIER: expected 400m, micro or pico, got $TIER" >&2; exit 2 ;;
esac
if [ ! -f "$run/model/config.json" ]; then
  $ccq train "${row}_$size" --run-dir "$run" --seed "$seed" --optimizer.lr "$rate" "${common[@]}" \
    ${REPEAT:+--identity.repeat "$REPEAT"}
  $ccq export "$run" "$run/model" --dtype bf16
fi
[ "${ONLY:-}" != train ] || exit 0
if [ ! -f "$run/eval/niah.json" ] || [ ! -f "$run/eval/length.json" ]; then
  mkdir -p "$run/eval/requests"
  cp "$out"/requests/{niah,length}.npz "$run/eval/requests/"
  for stage in score metrics; do # metrics need no GPU, and no weights
    $ccq eval "$run/model" --suite niah,length --stage $stage --out "$run/eval"
  done
fi
