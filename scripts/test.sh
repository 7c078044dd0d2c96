#!/usr/bin/env bash
# Run the whole suite in two halves at once: one mostly waits for Spark, the other mostly for servers, so that both
# together take two thirds of the time. Usage: scripts/test.sh PYTEST
set -uo pipefail
pytest=$1
spark_half=(tests/spark tests/docs tests/sim)

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$pytest" -q --durations=10 "${spark_half[@]}" >"$log" 2>&1 &
spark_pid=$!
echo "two halves run at once: ${spark_half[*]} in the background, everything else here"

"$pytest" -q --durations=10 "${spark_half[@]/#/--ignore=}" tests
rest=$?
wait "$spark_pid"
spark=$?
echo
echo "the other half: ${spark_half[*]}"
cat "$log"
exit $((rest > spark ? rest : spark))
