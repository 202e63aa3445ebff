#!/usr/bin/env bash
# One language model of the comparison at nano, from the choice of its rate to its results:
#   EVAL=DIR bash runs/nano_row.sh ROW SEED DATA OUT
# ROW is a system of ccq/systems.toml (gla, gla_unit, ccq_gla, ...), or ROW_conv, the same with a convolution of 4 tokens for
# q, k and v; DATA a set of runs/prepare_nano.sh with valid/ beside it, EVAL the evaluation data. The rate is the best of
# three after 25M tokens on validation text, with a seed that is not reported; RATE=2e-3 skips that. REPEAT=1 runs a seed
# once more, beside the first. VARIANT says how DATA differ from the usual. What is finished is not run again.
set -eu
row=$1 seed=$2 data=$3 out=$4
ccq=${CCQ:-ccq}
recipe=${row%_conv}_nano
common=(--data.path "$data" --data.valid-path "$(dirname "$data")/valid" --runtime.workers 1 --runtime.sample-every 0)
[ -z "${VARIANT:-}" ] || common+=(--identity.variant "$VARIANT")
case $row in *_conv) common+=(--model.conv-size 4) ;; esac
rate=${RATE:-}
if [ -z "$rate" ]; then
  mkdir -p "$out/sweep"
  (
    flock 9 # another seed of this row may be choosing it at this moment
    for lr in 1e-3 2e-3 4e-3; do
      [ -e "$out/sweep/$row-$lr/checkpoints/step-00000763" ] ||
        $ccq train "$recipe" --run-dir "$out/sweep/$row-$lr" --seed 1000 --steps 763 --optimizer.warmup 38 \
          --optimizer.lr $lr --runtime.checkpoint-every 100000 "${common[@]}"
    done
  ) 9> "$out/sweep/$row.lock"
  rate=$(python3 - "$out/sweep/$row" <<'P'
import json, sys
def loss(lr):  # after the last step; null where the run diverged
    rows = map(json.loads, open(f"{sys.argv[1]}-{lr}/log.jsonl"))
    last = [r["valid_loss"] for r in rows if "valid_loss" in r][-1]
    return float("inf") if last is None else last
losses = {lr: loss(lr) for lr in ("1e-3", "2e-3", "4e-3")}
if min(losses.values()) == float("inf"):
    sys.exit(f"{sys.argv[1]}: no rate has a validation loss after the last step, all of {', '.join(losses)} diverged")
print(min(losses, key=losses.get))
P
)
fi
run=$out/$row-seed$seed${REPEAT:+-repeat}
if [ ! -f "$run/model/config.json" ]; then
  $ccq train "$recipe" --run-dir "$run" --seed "$seed" --optimizer.lr "$rate" --runtime.checkpoint-every 100000 \
    --identity.repeat "${REPEAT:-0}" "${common[@]}"
  $ccq export "$run" "$run/model" --dtype bf16
fi
evaluate() { $ccq eval "$run/model" --out "$run/eval" ${EVAL:+--data "$EVAL"} ${STAGE:+--stage $STAGE} "$@"; }
evaluate --suite niah --sizing full --lengths 1024,2048,4096,8192 --limit 100 --keys odd
evaluate --suite length --limit 20 # nine lengths from 4,096 to 20,480, seven corpora
analyze() { [ -f "$run/analysis/$1_model.json" ] || $ccq analyze "$1" "$run/model" --out "$run/analysis" "${@:2}"; }
case $row in ccq_*) analyze gate ;; esac
[ "$seed" != 0 ] || analyze alignment # what one seed can show
case $row in
  ccq_gated_deltanet* | ccq_*_conv) # GLA without a convolution finds no needle at this size: nothing to switch off
    off() { $ccq analyze intervene "$run/model" --suite niah --sizing full --off --limit 100 --keys odd ${EVAL:+--data "$EVAL"} "$@"; }
    off --tasks niah_single_1 --lengths 1024,4096,16384,102400 --out "$run/intervene/passkey"
    off --tasks niah_single_2,niah_single_3 --lengths 1024,4096,16384 --out "$run/intervene/others"
    ;;
esac
