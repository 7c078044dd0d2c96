#!/usr/bin/env bash
# Run the whole suite in two halves at once: one mostly waits for Spark, the other mostly for servers, so that both
# together take two thirds of the time. Usage: scripts/test.sh PYTEST
#
# A test that fails while both halves fight for the cores is run once more, alone, and named as FLAKY when it passes
# then: it is to be mended, but it says more about the machine than about the change (docs/decisions/0007). A proof that
# broke a promise gets no second chance.
set -uo pipefail
pytest=$1
spark_half=(tests/spark tests/docs tests/sim tests/worker)

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$pytest" -q --durations=10 -o cache_dir="$dir/spark" "${spark_half[@]}" >"$dir/log" 2>&1 &
spark_pid=$!
echo "two halves run at once: ${spark_half[*]} in the background, everything else here"

"$pytest" -q --durations=10 -o cache_dir="$dir/rest" "${spark_half[@]/#/--ignore=}" tests
rest=$?
wait "$spark_pid"
spark=$?
echo
echo "the other half: ${spark_half[*]}"
cat "$dir/log"

# again HALF STATUS: the half's status, after a second run of what failed in it
again() {
  local failed="$dir/$1/v/cache/lastfailed"
  [ "$2" -eq 1 ] && [ -s "$failed" ] || return "$2"
  if grep -qE 'tests/(chaos|sim|model)/|prove|proof' "$failed"; then
    echo "a proof failed: no second run"
    return "$2"
  fi
  echo "failed beside the other half, run again alone:"
  cp "$failed" "$dir/names"
  "$pytest" -q -o cache_dir="$dir/$1" --lf --lfnf=none tests || return 1
  echo "FLAKY, to be mended: $(tr -d '{}\n' <"$dir/names")"
}

again rest "$rest"
rest=$?
again spark "$spark"
spark=$?
exit $((rest > spark ? rest : spark))
