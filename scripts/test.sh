#!/usr/bin/env bash
# Run the whole suite in lanes at once: Spark, the tests on clusters, and everything else in two processes.
# They mostly wait for servers, signals and leases, so that all together take little more than the longest lane.
# Usage: scripts/test.sh PYTEST
#
# What fails has failed. Only a test that is marked `timing`, with its reason, is run once more when the lanes are
# through, and its name goes into tests/reruns.txt: a name that is there already gets no second run (docs/decisions/0007).
set -uo pipefail
pytest=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# part NAME ARGUMENTS: one run of pytest with a memory of its own; its log goes to stdout, its status to a file
part() {
  local name=$1 began=$SECONDS
  shift
  echo "== $name"
  "$pytest" -q --durations=15 -o cache_dir="$dir/$name" "$@" tests
  echo $? >"$dir/$name.status"
  echo "== $name took $((SECONDS - began)) s"
}

# Spark's processes live for seconds here: the second compiler and a parallel collector only cost them cores.
export SPARK_SUBMIT_OPTS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
export SPARK_LAUNCHER_OPTS=$SPARK_SUBMIT_OPTS SPARK_DAEMON_JAVA_OPTS=$SPARK_SUBMIT_OPTS

echo "all lanes run at once: Spark and clusters in the background, everything else here"
{
  part spark -m "spark and not slow"  # one session for all
  part spark-slow -m "spark and slow" # mostly drivers and clusters of their own
} >"$dir/spark.log" 2>&1 &
part cluster -m "cluster and not spark" >"$dir/cluster.log" 2>&1 & # one process: each cluster is started once
part rest -m "not spark and not cluster" -n 2 --dist load --maxschedchunk 1
wait
cat "$dir"/{cluster,spark}.log

# again NAME: the status of that part, after a second run of what failed in it, if all of that may have one
again() {
  local status names again_before record=tests/reruns.txt
  local last=(-q -o cache_dir="$dir/$1" --lf --lfnf=none)
  status=$(cat "$dir/$1.status")
  [ "$status" -eq 1 ] && [ -s "$dir/$1/v/cache/lastfailed" ] || return "$status"
  "$pytest" "${last[@]}" -m "not timing" --collect-only tests >"$dir/firm" 2>&1
  if [ $? -ne 5 ]; then # 5: none
    echo "$1: no second run, not all that failed is marked timing:"
    grep '::' "$dir/firm"
    return 1
  fi
  names=$("$pytest" "${last[@]}" -m timing --collect-only tests | grep '::')
  touch "$record"
  if again_before=$(grep -xF "$names" "$record"); then
    echo "$1: no second run, these had one before and are to be mended: $again_before"
    return 1
  fi
  echo "$names" >>"$record"
  echo "$1: marked timing, run once more, alone, and recorded in $record: $names"
  "$pytest" "${last[@]}" -m timing tests
}

worst=0
for name in rest cluster spark-slow spark; do
  again "$name"
  status=$?
  ((status > worst)) && worst=$status
done
exit "$worst"
