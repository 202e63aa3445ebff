#!/usr/bin/env bash
# The paper at nano scale, as far as one GPU gets in minutes: the commands behind benchmarks/results and docs/results.md.
# Every part may be stopped and started again; it goes on with what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

pack() { # samples and curves are bulk: zstd, which whatever reads a .jsonl reads too
  python -c 'import pathlib, zstandard
for path in pathlib.Path("benchmarks/results").rglob("*.jsonl"):
    path.with_name(path.name + ".zst").write_bytes(zstandard.ZstdCompressor(level=19).compress(path.read_bytes()))
    path.unlink()'
}

# A. Recall (MQAR) at width 128: 16 rows x 4 learning rates x 2,000 steps, one row three times with one seed; then six rows
#    x 3 other seeds x 10,000 steps at the rates chosen on validation samples. About 12 minutes on one H200.
ccq sweep mqar --tier rows --workers 8 --out runs/mqar
ccq sweep mqar --tier seeds --workers 6 --out runs/mqar
cp runs/mqar/mqar_rows.json runs/mqar/mqar_seeds.json benchmarks/results/

# B. Language models at nano, 100M tokens each: six rows, three seeds; about 4 minutes a run on one H200, and 3 for the
#    choice of a row's rate. DATA holds train/ and eval/ (docs/data.md, docs/evaluation.md).
: "${DATA:?set it to the folder that holds train/ and eval/}"
bash runs/prepare_nano.sh "$DATA" runs/nano/data
for seed in 0 1 2; do
  for row in gla gla_unit ccq_gla ccq_gla_open gated_deltanet ccq_gated_deltanet; do
    EVAL=$DATA/eval bash runs/nano_row.sh $row $seed runs/nano/data/needles runs/nano/needles
  done
done
#    what the needle documents change: without them, and without RULER's own form; of a row that finds needles
other() { EVAL=$DATA/eval RATE=4e-3 VARIANT=$2 bash runs/nano_row.sh gated_deltanet 0 runs/nano/data/$1 runs/nano/$1; }
other plain "trained on plain text"
other no-ruler "trained on needles of other forms"
#    run to run: a seed once more. Of what this script makes, the files in benchmarks/results/nano lack the evaluations of
#    the repeated rows of GLA, cleaning switched off in the first runs of seeds 0 and 1, and alignment in GLA and CCQ-GLA.
for again in "gla_unit 0" "ccq_gla 0" "ccq_gla_open 0" "ccq_gated_deltanet 0" "ccq_gated_deltanet 1"; do
  EVAL=$DATA/eval REPEAT=1 bash runs/nano_row.sh $again runs/nano/data/needles runs/nano/needles
done
for run in runs/nano/{needles,plain,no-ruler}/{*-seed*,sweep/*}/; do # what of it docs/results.md is made from
  for part in "$run"{config.json,data.json,log.jsonl,provenance.json,eval/{niah,length}.json{,l},analysis/*.json} \
    "$run"intervene/{passkey,others}/{intervene.json,{none,off}/niah.json{,l}}; do
    [ ! -f "$part" ] || install -D -m 644 "$part" "benchmarks/results/${part#runs/}"
  done
done
pack

# C. The models that ship, and the same without a convolution: six at once on one GPU in about 6 minutes. A backbone, its
#    control and CCQ, alike but for that.
bash runs/prepare_pico.sh "$DATA" runs/pico/data
pico() { # ROW FOLDER [OPTION...]
  local row=$1 out=$2 name=${1//_/-}-pico
  shift 2
  ccq train ${row}_pico --data.path runs/pico/data/train --data.valid-path runs/pico/data/valid --run-dir $out/runs/$name \
    --steps 3800 --optimizer.warmup 190 "$@" &&
    ccq export $out/runs/$name $out/models/$name --dtype bf16 &&
    ccq eval $out/models/$name --suite niah --sizing full --lengths 512,1024,2048,4096 --limit 100 --keys odd --data "$DATA/eval" \
      --out $out/scored/$name &&
    ccq eval $out/models/$name --suite length --tasks pg19,govreport,elife --lengths 512,1024,2048,4096,8192,16384 \
      --limit 24 --data "$DATA/eval" --out $out/scored/$name
}
failed="" pids=""
for row in gla gla_unit ccq_gla; do
  pico $row runs/pico/conv --model.conv-size 4 &
  pids="$pids $!"
  pico $row runs/pico/plain &
  pids="$pids $!"
done
for pid in $pids; do wait "$pid" || failed=1; done # a bare `wait` forgets how they ended
[ -z "$failed" ] || { echo "One of the models of part C failed, see above; what follows takes all six." >&2; exit 1; }
python runs/ship_pico.py --data runs/pico/data --plain-runs runs/pico/plain/runs --plain-scored runs/pico/plain/scored \
  --models runs/pico/conv/models --runs runs/pico/conv/runs --scored runs/pico/conv/scored
for row in gla gla_unit ccq_gla; do # what of it docs/results.md is made from
  name=${row//_/-}
  for kind in conv plain; do
    to=benchmarks/results/pico/$name$([ $kind = plain ] || echo -conv)-pico
    mkdir -p $to/eval
    cp runs/pico/$kind/runs/$name-pico/{config.json,data.json,log.jsonl,provenance.json} $to/
    cp runs/pico/$kind/scored/$name-pico/{niah,length}.json $to/eval/
  done
  ccq analyze alignment $name-pico --out benchmarks/results/pico/$name-conv-pico/analysis --figures runs/pico/figures
done
#    what the gate of the one with CCQ does, and what is missed without its cleaning; a quarter of an hour on two cores
ccq analyze gate ccq-gla-pico --out benchmarks/results/pico/ccq-gla-conv-pico/analysis
ccq analyze margin ccq-gla-pico --out benchmarks/results/pico/ccq-gla-conv-pico/analysis
ccq analyze intervene ccq-gla-pico --suite niah --sizing full --tasks niah_single_1,niah_single_2 --lengths 512,1024,2048,4096 --limit 100 \
  --keys odd --data "$DATA/eval" --off --out runs/pico/intervene
cp runs/pico/intervene/intervene.json benchmarks/results/pico/ccq-gla-conv-pico/analysis/
pack
