#!/usr/bin/env bash
# The whole paper on one node of eight GPUs: bash runs/reproduce_paper.sh [OUT]
#
# Weeks of the node (the plan is printed first) and 100 GB of disk for the tokens. Every part may be stopped and started
# again; it goes on where it was. docs/assumptions.md says what the paper leaves open and what is done here.
# PLAN_ONLY=1 prints the plan and stops. SIZES="500m" runs one scale.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/paper}
gpus=${GPUS:-8}
sizes=${SIZES:-500m 1.3b}
# the paper's seven, and the control of CCQ-GLA that the paper lacks: unit q and k without cleaning
systems=(transformer mamba2 gla gla_unit gla_hedgehog gated_deltanet ccq_gla ccq_gated_deltanet)
ablations=(ccq_gated_deltanet_uncentred ccq_gated_deltanet_fixed_lam) # at 1.3B

recipes=()
for size in $sizes; do
  for system in "${systems[@]}"; do recipes+=("${system}_$size"); done
  if [ "$size" = 1.3b ]; then
    for system in "${ablations[@]}"; do recipes+=("${system}_$size"); done
  fi
done

echo "The plan, a run after the other:"
for recipe in "${recipes[@]}"; do
  echo "$recipe"
  ccq plan "$recipe" --gpus "$gpus"
done
[ -z "${PLAN_ONLY:-}" ] || exit 0

# 1. Tokens: 40B of FineWeb-Edu, and 10M of its first documents, which training skips, to validate on
fineweb=(--dataset HuggingFaceFW/fineweb-edu --subset sample-100BT)
[ -f "$out/tokenizer/tokenizer.json" ] || ccq data tokenizer "${fineweb[@]}" --sample 2G --out "$out/tokenizer"
ccq data prepare "${fineweb[@]}" --tokenizer "$out/tokenizer" --out "$out/valid" --max-tokens 10M
ccq data prepare "${fineweb[@]}" --tokenizer "$out/tokenizer" --out "$out/train" --skip 20000 --max-tokens 40G

# 2. Training, and each model as a folder that from_pretrained loads
for recipe in "${recipes[@]}"; do
  torchrun --nproc-per-node "$gpus" -m ccq train "$recipe" --run-dir "$out/$recipe" \
    --data.path "$out/train" --data.valid-path "$out/valid"
  [ -f "$out/$recipe/model/config.json" ] || ccq export "$out/$recipe" "$out/$recipe/model" --dtype bf16
done

# 3. The four axes, a model a GPU; one that fails does not keep the others, and this script says so at its end
failed="" pids=""
finished() { # a bare `wait` forgets how they ended
  for pid in $pids; do wait "$pid" || failed=1; done
  pids=""
}
gpu=0
for recipe in "${recipes[@]}"; do
  CUDA_VISIBLE_DEVICES=$gpu ccq eval "$out/$recipe/model" --suite lm,niah,length,longbench --out "$out/$recipe/eval" &
  pids="$pids $!"
  gpu=$(((gpu + 1) % gpus))
  [ "$gpu" != 0 ] || finished
done
finished

# 4. What the gate does, what is lost without cleaning, and where keys lie
for size in $sizes; do
  for system in ccq_gla ccq_gated_deltanet; do
    ccq analyze gate "$out/${system}_$size/model" --out "$out/${system}_$size/analysis"
  done
done
case " $sizes " in *" 1.3b "*)
  model=$out/ccq_gated_deltanet_1.3b
  ccq analyze intervene "$model/model" --off --suite niah --tasks niah_single_1 \
    --lengths 4096,8192,16384,32768,65536,102400 --out "$model/intervene/passkey"
  ccq analyze intervene "$model/model" --off --suite niah --tasks niah_single_2,niah_single_3 \
    --lengths 4096,8192,16384 --out "$model/intervene/others" ;;
esac
case " $sizes " in *" 500m "*)
  ccq analyze alignment "$out/gated_deltanet_500m/model" --name gated-deltanet-500m --out "$out/analysis" ;;
esac
ccq analyze alignment Qwen/Qwen3-4B-Instruct-2507 --out "$out/analysis"

# 5. Speed: the paper's per-layer table, training, prefill and decoding, on one GPU
mkdir -p "$out/bench"
python benchmarks/bench_kernels.py layer --out "$out/bench/layer.json"
ccq bench train --out "$out/bench/train.json"
ccq bench prefill --out "$out/bench/prefill.json"
ccq bench decode --out "$out/bench/decode.json"

# 6. The page: the paper's tables and figures with these numbers beside the paper's, and the verdict on its claims
ccq report "$out" -o "$out/report"
[ -z "$failed" ] || { echo "An evaluation of part 3 failed, see above: the report lacks it." >&2; exit 1; }
