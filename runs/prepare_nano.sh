#!/usr/bin/env bash
# Tokens for the language models at `nano`: bash runs/prepare_nano.sh DATA OUT
#
# DATA/train holds the text (JSON lines with `id` and `text`; about 93M tokens), DATA/eval the essays that no haystack
# may be part of. Natural text alone teaches no retrieval at this size, so a tenth of all characters is needle documents
# (ccq/data/needles.py); two more sets show what that changes: one without them, one without RULER's own form.
set -eu
data=$1 out=$2
prepare() { ccq data prepare "$data/train" --exclude 'valid*' --tokenizer "$out/tokenizer" ${WORKERS:+--workers $WORKERS} "$@"; }
needles=(--needles 0.1 --needle-length 300 12000 --needle-exclude "$data/eval/PaulGrahamEssays.json.zst")

[ -f "$out/tokenizer/tokenizer.json" ] ||
  ccq data tokenizer "$data/train" --exclude 'valid*' --sample 150M --out "$out/tokenizer"
ccq data prepare "$data/train/valid.jsonl.zst" --tokenizer "$out/tokenizer" --out "$out/valid"
prepare "${needles[@]}" --out "$out/needles"
prepare --out "$out/plain"
prepare "${needles[@]}" --needle-forms note register --out "$out/no-ruler"
