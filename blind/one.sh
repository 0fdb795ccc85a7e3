#!/bin/bash
# one.sh KIND MODULE CLASS: check one, quietly; the report and what was printed lie in blind/reports
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH PYTHONPATH=$PWD
extra=(); [ "$1" = cluster_environment ] && extra=(--tables blind/tables.json)
start=$(date +%s)
nice -n 19 timeout 900 python -m blind.run "$1" "blind.$2:$3" "${extra[@]}" --report "blind/reports/$3.json" >"blind/reports/$3.txt" 2>&1
echo "$3 rc=$? $(( $(date +%s) - start ))s $(tail -1 blind/reports/$3.txt)"
