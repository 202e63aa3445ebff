#!/usr/bin/env bash
# Tokens for the shipped models: bash runs/prepare_pico.sh DATA OUT
#
# DATA/train holds the text (JSON lines with `id` and `text`), DATA/eval the essays that no haystack may be part of.
# Only sources whose licence allows to ship what was trained on them, by the beginning of a document's id: Project
# Gutenberg (public domain), eLife (CC BY 4.0, CC0), GitHub and Kubernetes docs (CC BY 4.0), and the nine OpenStax
# repositories under CC BY 4.0. Half of all characters are needle documents (ccq/data/needles.py), whose haystacks are
# of the same text: natural text alone teaches no retrieval at this size.
set -eu
data=$1 out=$2
filters=(--filter pg --filter elife/ --filter github/ --filter kubernetes/)
for book in college-success-bundle introduction-anthropology introduction-business introduction-intellectual-property \
    life-liberty-and-pursuit-happiness nursing-external-bundle physics principles-economics-bundle statistics; do
  filters+=(--filter "openstax/osbooks-$book/")
done
text=("$data"/train/{gutenberg_0,elife_0,openstax_0,openstax_1,techdocs}.jsonl.zst)
prepare() { ccq data prepare "$@" "${filters[@]}" --tokenizer "$out/tokenizer" ${WORKERS:+--workers $WORKERS}; }

[ -f "$out/tokenizer/tokenizer.json" ] ||
  ccq data tokenizer "${text[@]}" "${filters[@]}" --vocab-size 8192 --out "$out/tokenizer"
prepare "${text[@]}" --out "$out/train" \
  --needles 0.5 --needle-length 300 6000 --needle-exclude "$data/eval/PaulGrahamEssays.json.zst"
prepare "$data/train/valid.jsonl.zst" --out "$out/valid" # of the same sources, held out of the above; no needles
