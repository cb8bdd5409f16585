#!/usr/bin/env bash
# SmolLM2 in generated households with and without what a table of values recalls, paired by game. Hours on a laptop; a
# second call goes on where the first was stopped. Written to runs/bench/samem-recall-KIND.
#   scripts/bench/samem_recall.sh actions      a policy that writes actions only
#   scripts/bench/samem_recall.sh thoughts     a policy that thinks before it acts
# The warm start is that of learning.sh; the tables are learnt from 256 games that it plays in training; then 60 held-out
# games in each arm:
#   none       without a table
#   hint       the state's best thought is shown; of a policy that does not think, its best action with roles for names
#   replace    it takes the place of the policy's own thought; of a policy that does not think, an action is played
set -euo pipefail

. "$(dirname "$(dirname "${BASH_SOURCE[0]}")")/env.sh"
kind="${1:-}"
case "$kind" in
  actions) prompting=() hint=(lifted=true) replace=(store=action) ;;
  thoughts) prompting=(agent.thoughts=true agent.max_new_tokens=48 agent.context_tokens=1536) hint=() replace=() ;;
  *) fail "name what the policy writes: actions or thoughts" ;;
esac
[ -n "${VIRTUAL_ENV:-}" ] || prepare cpu
out="runs/bench/samem-recall-$kind"
# Summaries have letters for the task's things, so only equal ones are one state; and thoughts, which need no vectors.
table=(threshold=0.9999 thought_threshold=1 judge=none embedder.kind=hashing)

# resumed FILE FOLDER COMMAND…: run COMMAND unless FILE is there, with --resume where FOLDER tells that it was begun.
resumed() {
  [ -f "$1" ] || if [ -d "$2" ]; then "${@:3}" --resume; else "${@:3}"; fi
}

# play NAME SET [key=value …]: the policy's evaluation on a task set.
play() {
  resumed "$out/$1/evals/eval.json" "$out/$1/episodes" saga eval "$out/warm" --set "$2" --out "$out/$1" "${@:3}"
}

# recall NAME MODE [key=value …]: learn a table of that name with those settings, and play with it.
recall() {
  local own=("${table[@]}" "${@:3}")
  saga samem learn "$out/rollouts/episodes/eval.jsonl.gz" "${own[@]}" --table "$1" --store "$out/values.db"
  play "$1" household/easy/eval:48-107 samem.database="$out/values.db" samem.table="$1" samem.recall="$2" \
    "${own[@]/#/samem.}"
  saga compare "$out/none" "$out/$1"
}

resumed "$out/warm/result.json" "$out/warm" saga train configs/learning-household.yaml run.dir="$out" run.name=warm \
  grpo=null eval.tasks=household/easy/eval:48-49 "${prompting[@]}"
play rollouts household/easy/train:2000-2255 eval.temperature=0.7
play none household/easy/eval:48-107
recall hint hint "${hint[@]}"
recall replace replace "${replace[@]}"
