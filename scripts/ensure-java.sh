#!/bin/bash
# Print the home of a Java 17 or newer on stdout; install one when there is none and we may (Debian-like, root).
# Everything else goes to stderr. With --dry-run, print the decision and change nothing.
#   use HOME | install PACKAGE... | ask
# PARTI_JVM_DIR replaces /usr/lib/jvm.
set -euo pipefail

readonly OLDEST=17
readonly JVM_DIR="${PARTI_JVM_DIR:-/usr/lib/jvm}"
# The first that the distribution offers is installed: Debian 13 has no 17 any more.
readonly PACKAGES=(openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless)

major_of() { # the major version of a java program: 17 for "17.0.9", 8 for "1.8.0_402", 0 when it does not run
  local text
  text="$("$1" -version 2>&1)" || { echo 0; return; }
  if [[ $text =~ version\ \"1\.([0-9]+) ]]; then echo "${BASH_REMATCH[1]}"
  elif [[ $text =~ version\ \"([0-9]+) ]]; then echo "${BASH_REMATCH[1]}"
  else echo 0; fi
}

home_of() { # the home that JAVA_HOME has to name: bin/java may be a chain of links
  local program="$1" resolved
  resolved="$(readlink -f "$program" 2>/dev/null || true)"
  program="${resolved:-$program}"
  echo "${program%/bin/java}"
}

find_java() { # the home of the first Java that is new enough: JAVA_HOME, then PATH, then the JVM folders
  local program
  for program in "${JAVA_HOME:+$JAVA_HOME/bin/java}" "$(type -P java || true)" "$JVM_DIR"/*/bin/java; do
    if [[ -n $program && -x $program ]] && (( $(major_of "$program") >= OLDEST )); then
      home_of "$program"
      return
    fi
  done
  return 1
}

may_install() { type -P apt-get >/dev/null && [[ "$(id -u)" == 0 ]]; }

offered() { # the first package that this distribution has
  local package
  for package in "${PACKAGES[@]}"; do
    if apt-cache show "$package" >/dev/null 2>&1; then echo "$package"; return; fi
  done
  echo "${PACKAGES[0]}" # apt-get then says itself what is wrong
}

install_java() {
  echo "No Java $OLDEST or newer found: installing one with apt-get" >&2
  apt-get update >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$(offered)" >&2
}

ask() {
  printf '%s\n' >&2 \
    "Error: Spark needs Java $OLDEST or newer; none was found in JAVA_HOME, on PATH or in $JVM_DIR. Install it:" \
    "  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless" \
    "  Fedora:          sudo dnf install java-21-openjdk-headless" \
    "  macOS:           brew install openjdk@17" \
    "or set JAVA_HOME to one that you have."
}

if [[ ${1:-} == --dry-run ]]; then
  if home="$(find_java)"; then echo "use $home"
  elif may_install; then echo "install $(offered)"
  else ask; echo "ask"; fi
  exit 0
fi

if find_java; then exit 0; fi
if may_install; then
  install_java
  if find_java; then exit 0; fi
  echo "Error: apt-get installed no Java $OLDEST or newer" >&2
  exit 1
fi
ask
exit 1
