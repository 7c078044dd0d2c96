#!/usr/bin/env bash
# Run the whole suite in lanes at once: Spark, the tests on clusters, and everything else in two processes.
# They mostly wait for servers, signals and leases, so that all together take little more than the longest lane.
# Usage: scripts/test.sh PYTEST
#
# No test gets a second run: what fails beside the other lanes is to be explained (docs/decisions/0007).
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

worst=0
for name in rest cluster spark-slow spark; do
  status=$(cat "$dir/$name.status" 2>/dev/null) || status=1 # a lane that was killed leaves none
  ((status > worst)) && worst=$status
done
exit "$worst"
