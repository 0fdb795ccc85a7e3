"""What fairscale 0.4.13 does wrong beside torch 2.13; what goes around it can go when a test here fails."""

import fairscale_defects as defects
import pytest
import torch

pytestmark = [pytest.mark.usefixtures("fairscale"), pytest.mark.timeout(120)]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store")


@pytest.mark.parametrize(
    ("buffer_size", "set_to_none", "right"), [(2**23, True, False), (2**23, False, True), (0, True, True)]
)
def test_zero_grad_to_none_drops_the_views_of_reduce_buckets_in_silence(world2, path, buffer_size, set_to_none, right):
    """The strategy has no buckets; ``torch.optim`` sets gradients to None unless told otherwise."""
    assert all(world2.run(defects.reduced_after, path, buffer_size, set_to_none)) is right


def test_oss_clips_by_the_norm_of_what_had_a_gradient_at_the_first_call(world2, path):
    assert world2.run(defects.clipped_norms, path)[0] == pytest.approx((2**0.5, 2**0.5))  # the second is 2


def test_oss_empties_the_state_that_it_loads(world2, path):
    before, after = world2.run(defects.state_after_loading, path)[0]
    assert before == [3, 3, 3, 3] and 0 in after


def test_oss_takes_one_dtype(world2, path):
    assert any(
        "Different types for the bucket and the param" in one for one in world2.run(defects.error_of_dtypes, path)
    )


def test_oss_fails_on_an_empty_first_group(world2, path):
    assert world2.run(defects.error_of_an_empty_group, path) == ["IndexError"] * 2


def test_oss_changes_strides_for_which_ddp_gives_wrong_gradients(world2, path):
    keeps, right = world2.run(defects.strides_and_gradient, path)[0]
    assert (keeps, right) == (False, False)


def test_oss_does_not_send_what_was_unfrozen_since(world2, path):
    one, other = world2.run(defects.unfrozen_parameter, path)
    assert not torch.equal(one, other)


def test_sharded_ddp_adds_up_different_gradients_where_ranks_have_another_order(world2, path):
    assert not all(world2.run(defects.in_another_order, path))


def test_sharded_ddp_does_not_wait_after_a_checkpointed_layers_backward(world2, path):
    assert world2.run(defects.left_by_a_nested_backward, path)[0] > 0


def test_sharded_ddp_does_not_reduce_a_second_backward_of_one_forward(world2, path):
    assert not all(world2.run(defects.second_backward, path))


def test_checkpoint_wrapper_computes_again_without_autocast():
    assert defects.recomputed_dtypes() == ["torch.bfloat16", "torch.float32"]


def test_a_copy_of_a_checkpointed_layer_computes_with_the_weights_of_the_first():
    assert defects.output_of_a_copy()


def test_an_error_in_a_checkpointed_layer_leaves_its_batch_norms_without_statistics():
    assert defects.statistics_after_an_error() is False


def test_no_sync_stays_after_an_error(world2, path):
    assert world2.run(defects.flag_after_an_error, path) == [True, True]


def test_fully_sharded_data_parallel_needs_cuda_streams_on_the_cpu_too(world2, path):
    """Which is why it is refused: see ``FairscaleFSDPStrategy``."""
    assert world2.run(defects.error_of_fully_sharded, path) == ["'all_gather'"] * 2
