"""Run the conformance checks of the components, one test per check."""
{% if 'logger' in cookiecutter.__kinds.split(',') %}
import json
from pathlib import Path
{% endif %}
from torchhal_conformance import conformance_suite

ALIAS = "{{ cookiecutter.__alias }}"
{%- for kind in cookiecutter.__kinds.split(',') %}
{%- if kind == 'cluster_environment' %}
PREFIX = "{{ cookiecutter.__alias | upper }}_"
# The variables of two nodes with two processes each, as the launcher sets them. Record real ones here.
TABLES = [
    {
        f"{PREFIX}RANK": str(rank),
        f"{PREFIX}WORLD_SIZE": "4",
        f"{PREFIX}LOCAL_RANK": str(rank % 2),
        f"{PREFIX}LOCAL_WORLD_SIZE": "2",
        f"{PREFIX}NODE_RANK": str(rank // 2),
        f"{PREFIX}NUM_NODES": "2",
        f"{PREFIX}MAIN_ADDRESS": "node0",
        f"{PREFIX}MAIN_PORT": "29500",
    }
    for rank in range(4)
]
{%- elif kind == 'logger' %}


def read(logger):
    """Return what the service has: rows of metrics with their step, and rows of hyperparameters."""
    rows = []
    path = Path(logger.save_dir) / f"{ALIAS}.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        if "hyperparameters" in row:
            rows.append({"params": row["hyperparameters"]})
        else:
            rows.append({"step": row.pop("step"), "metrics": row})
    return rows
{% endif %}
{%- endfor %}
{% for kind in cookiecutter.__kinds.split(',') %}
{%- if kind == 'cluster_environment' %}
TestEnvironment = conformance_suite("cluster_environment", ALIAS, tables=TABLES)
{%- elif kind == 'precision' %}
TestPrecision = conformance_suite("precision", f"{ALIAS}_bf16")
{%- elif kind == 'checkpoint_io' %}
TestCheckpointIO = conformance_suite("checkpoint_io", f"{ALIAS}_file")
{%- elif kind == 'logger' %}
TestLogger = conformance_suite("logger", ALIAS, read=read)
{%- else %}
Test{{ kind | capitalize }} = conformance_suite("{{ kind }}", ALIAS)
{%- endif %}
{%- endfor %}
