"""What Colossal-AI 0.5.0 does wrong or otherwise, and the package steps around: a test fails where it has changed."""

import inspect
import subprocess
import sys
import textwrap

import colossalai_defects as defects
import pytest
import torch
from colossalai_defects import in_group, with_the_check, without_streams

pytestmark = [pytest.mark.usefixtures("colossalai"), pytest.mark.timeout(120)]

IMPORT = """
    import os, warnings, torch
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    filters = list(warnings.filters)
    {load}
    added = [entry for entry in warnings.filters if entry not in filters and "lr_scheduler" in str(entry)]
    print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), torch.distributions.Distribution._validate_args, bool(added))
"""


@pytest.mark.parametrize(
    ("load", "left"),
    [
        ("import colossalai.booster.plugin", "1 False True"),
        ("from torchhal_colossalai import _sdk; _sdk.load()", "None True False"),
    ],
    ids=["its-own-import", "the-packages"],
)
def test_the_import_sets_a_variable_a_filter_and_the_validation_of_distributions(load, left):
    code = textwrap.dedent(IMPORT).format(load=load)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == left
    assert bool(done.stderr) is (left != "None True False")  # the import warns of what isn't installed


def test_the_cpus_accelerator_has_no_streams(world2):
    for told in world2.run(without_streams, defects.made):
        assert told == "RuntimeError: this method is not supported for cpu accelerator"


def test_zero_refuses_a_cpu(world2):
    for told in world2.run(with_the_check, defects.made):
        assert told == "AssertionError: device is required"


def test_the_data_parallel_plugin_makes_every_batch_norm_synchronized(world2):
    told = world2.run(in_group, defects.batch_norms, False)
    assert told == ["ValueError: SyncBatchNorm layers only work with GPU modules"] * 2
    assert world2.run(in_group, defects.batch_norms, True) == ["BatchNorm1d"] * 2


def test_zero_leaves_out_what_is_frozen_for_good(world2):
    assert world2.run(in_group, defects.frozen) == [1, 1]


def test_zero_puts_shards_into_the_users_groups(world2):
    assert world2.run(in_group, defects.users_groups) == [[False, False]] * 2


def test_zero_needs_a_parameter_in_the_first_group(world2):
    assert world2.run(in_group, defects.first_group_is_empty)[0].startswith("IndexError")


def test_zero_divides_no_parameter_that_isnt_contiguous(world2):
    assert "view size is not compatible" in world2.run(in_group, defects.made, defects.Turned)[0]


def test_zero_divides_no_parameter_without_an_element(world2):
    told = world2.run(in_group, defects.made, defects.Empty)
    assert any(each != "made" for each in told), told


def test_zero_steps_float64_weights_in_float32_by_default(world2):
    assert world2.run(in_group, defects.double_weights)[0] == {torch.float32}


def test_zero_adds_up_gradients_of_different_parameters_without_an_error(world2):
    """Each rank has used one of two parameters: its gradient has that of the other's in it."""
    for (gradient, *_), _ in world2.run(in_group, defects.other_branches):
        assert gradient == [1.5] * 4  # (1 + 2) / 2, of which 0.5 and 1.0 are right


def test_zero_takes_gradients_away_from_the_parameters(world2):
    assert all(gone for _, gone in world2.run(in_group, defects.other_branches))


def test_zeros_state_dict_takes_numbers_for_shards(world2):
    told = world2.run(in_group, defects.state_of_nadam)[0]
    assert told.startswith("RuntimeError") and "shape" in told, told


def test_stage_2_accumulates_no_gradients(world2):
    told = world2.run(in_group, defects.backward_without_sync)[0]
    assert told == "AssertionError: ZeRO2(partition_grads) and no_sync are not compatible"


def test_zeros_step_takes_no_closure(world2):
    assert world2.run(in_group, defects.closure)[0] == "AssertionError: closure is not supported by step()"


def test_a_plugin_renames_its_class(world2):
    assert world2.run(in_group, defects.plugins_name)[0] == ("LowLevelZeroPlugin", "LowLevelZeroPlugin_ZeRO-2")


def test_the_coordinator_keeps_the_ranks_of_the_first_process_group(world2):
    assert world2.run(in_group, defects.coordinator)[0] == (True, False, True)


def test_a_plugin_drops_the_state_of_colossal_ais_own_optimizers(world2):
    assert world2.run(in_group, defects.cast)[0] == (False, {})


def test_gemini_makes_a_stream_when_it_wraps_a_model(world2):
    told = world2.run(without_streams, defects.gemini)[0]
    assert told == "RuntimeError: this method is not supported for cpu accelerator"


def test_hybrid_parallel_divides_models_of_transformers_only(world2):
    told = world2.run(in_group, defects.hybrid)[0]
    assert told.startswith("NotImplementedError: Auto policy for Linear") and "transformers.models" in told


def test_the_options_are_those_of_the_installed_plugins():
    from torchhal_colossalai import _options as options
    from torchhal_colossalai import _sdk as sdk

    sdk.load()
    from colossalai.booster import plugin as plugins

    for name, cls in options.CLASSES.items():
        parameters = dict(inspect.signature(getattr(plugins, cls).__init__).parameters)
        del parameters["self"]
        carried = options.CARRIED.get(name, {})
        known = {*carried, *options.REFUSED.get(name, {}), *options.NAMED.get(name, ())}
        assert known == set(parameters), name
        assert {key: parameters[key].default for key in carried} == carried
