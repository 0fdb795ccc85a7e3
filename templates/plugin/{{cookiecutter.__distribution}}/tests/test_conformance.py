"""Run the conformance checks of the components, one test per check."""

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
{%- endif %}
{%- endfor %}
{% for kind in cookiecutter.__kinds.split(',') %}
{%- if kind == 'cluster_environment' %}
TestEnvironment = conformance_suite("cluster_environment", ALIAS, tables=TABLES)
{%- elif kind == 'precision' %}
TestPrecision = conformance_suite("precision", f"{ALIAS}_bf16")
{%- elif kind == 'checkpoint_io' %}
TestCheckpointIO = conformance_suite("checkpoint_io", f"{ALIAS}_file")
{%- else %}
Test{{ kind | capitalize }} = conformance_suite("{{ kind }}", ALIAS)
{%- endif %}
{%- endfor %}
