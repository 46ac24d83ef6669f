"""Tests of the input checks of sessions: values and rows of masks, and sequence lengths that exceed the model's
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
import transformers

from accel.artifact.tensor_specs import TensorSpec
from accel.capture.speech_samples import longest_sound
from accel.errors import InputError
from accel.interfaces.session_contract import InputValueCheck, MaskCheck, ShapeCheck, read_feeds

AXES = ("batch", "sequence")


def spec(name: str = "attention_mask", *, most: int = 1, axes: tuple[str, ...] = AXES) -> TensorSpec:
    return TensorSpec(name, "int64", axes, role="mask", bounds=(0, most))


def both_ways(check: InputValueCheck, mask: torch.Tensor) -> list[str]:
    """Return the errors for a mask that is passed by name, and for the same mask passed as an array in the graph's
    input order.
    """
    return errors(check, {"attention_mask": mask})


def errors(check: InputValueCheck, feeds: Mapping[str, torch.Tensor]) -> list[str]:
    messages = []
    calls: list[Callable[[], None]] = [
        lambda: check(feeds),
        lambda: check.arrays([tensor.numpy() for tensor in feeds.values()]),
    ]
    for call in calls:
        try:
            call()
        except InputError as error:
            messages.append(error.message)
    return messages


@pytest.mark.parametrize("length", [4, 40], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_masks_of_any_dtype(length: int, dtype: torch.dtype) -> None:
    check = InputValueCheck([spec()])
    mask = torch.ones(3, length, dtype=dtype)
    mask[1, 2:] = 0
    mask[2, :-1] = 0
    assert both_ways(check, mask) == []
    mask[2] = 0
    assert all(
        "Row 2 of the input 'attention_mask' contains only zeros" in message for message in both_ways(check, mask)
    )
    assert len(both_ways(check, mask)) == 2


@pytest.mark.parametrize("length", [4, 40], ids=["few", "many"])
@pytest.mark.parametrize("value", [-1, 2, -(2**40), 2**40])
def test_other_values_in_masks_are_refused(length: int, value: int) -> None:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, 1] = value
    messages = both_ways(InputValueCheck([spec()]), mask)
    assert len(messages) == 2
    assert all(f"contains the value {value}, but the model allows only 0 to 1" in message for message in messages)


def test_mask_with_global_attention() -> None:
    mask = torch.tensor([[2, 1, 1, 0]])
    assert both_ways(InputValueCheck([spec(most=2)]), mask) == []
    assert len(both_ways(InputValueCheck([spec(most=2)]), mask + 1)) == 2


@pytest.mark.parametrize("axes", [("batch", "choices", "sequence"), AXES])
def test_masks_of_any_rank(axes: tuple[str, ...]) -> None:
    mask = torch.ones([2] * len(axes), dtype=torch.int64)
    assert both_ways(InputValueCheck([spec(axes=axes)]), mask) == []
    mask[-1, ...] = 0
    assert len(both_ways(InputValueCheck([spec(axes=axes)]), mask)) == 2


def test_prompt_chunk_may_have_rows_without_a_token() -> None:
    check = InputValueCheck([spec(axes=("batch", "total"))])
    assert both_ways(check, torch.tensor([[0, 0], [1, 1]])) == []
    assert len(both_ways(check, torch.tensor([[0, 3], [1, 1]]))) == 2


def test_masks_of_wrong_rank_are_left_to_the_shape_check() -> None:
    check = InputValueCheck([spec()])
    for mask in (torch.tensor(0), torch.zeros(3, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64)):
        assert both_ways(check, mask) == []


def test_value_check_skips_masks_without_bounds() -> None:
    check = InputValueCheck([TensorSpec("attention_mask", "int64", AXES, role="mask")])
    assert both_ways(check, torch.full((2, 3), 7)) == []
    assert both_ways(check, torch.zeros(2, 3, dtype=torch.int64)) == []


def test_masks_are_not_clamped_on_the_gpu() -> None:
    ids = TensorSpec("input_ids", "int64", AXES, bounds=(0, 9))
    assert InputValueCheck([ids, spec()]).bounds == {"input_ids": (0, 9)}


def test_mask_check_skips_masks_with_bounds() -> None:
    hidden = np.zeros((2, 3), np.int64)
    MaskCheck([spec()]).arrays([hidden])
    with pytest.raises(InputError, match="Row 0 of the input 'attention_mask'"):
        MaskCheck([TensorSpec("attention_mask", "int64", AXES, role="mask")]).arrays([hidden])


def test_sizes_are_limited_by_positions() -> None:
    sounds = TensorSpec("input_values", "float32", ("batch", "samples"))
    check = ShapeCheck([sounds], limits={"samples": 100, "frames": 5})
    for _ in range(2):
        check(((2, 100),))
        with pytest.raises(
            InputError, match="axis 'samples' has the size 101, and the model has positions for only 100"
        ):
            check(((2, 101),))


def test_maximum_audio_length_of_a_conformer() -> None:
    """The longest accepted audio of a Conformer is one sample shorter than the shortest audio that needs one position
    more than the model has.
    """
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16), conv_kernel=(10, 3),
        conv_stride=(5, 4), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, vocab_size=20, max_source_positions=30,
    )  # fmt: skip
    model = transformers.Wav2Vec2ConformerForCTC(config).eval()
    axes = {"input_values": {0: "batch", 1: "samples"}}
    longest = longest_sound(model, axes)["samples"]
    assert model._get_feat_extract_output_lengths(longest) == 30
    assert model._get_feat_extract_output_lengths(longest + 1) == 31
    config.position_embeddings_type = "rotary"
    assert longest_sound(transformers.Wav2Vec2ConformerForCTC(config), axes) == {}


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32 + 5])
def test_integers_out_of_range_are_refused(value: int) -> None:
    takes = {"input_ids": torch.int32}
    with pytest.raises(InputError, match=f"contains the value {value}, but the model's dtype torch.int32"):
        read_feeds({"input_ids": torch.tensor([[5, value]])}, takes)
    fits = torch.tensor([[5, 2**31 - 1, -(2**31)]])
    assert torch.equal(read_feeds({"input_ids": fits}, takes)["input_ids"].long(), fits)
    large = torch.tensor([[2**63 + 5]], dtype=torch.uint64)
    with pytest.raises(InputError, match=f"contains the value {2**63 + 5}"):
        read_feeds({"input_ids": large}, {"input_ids": torch.int64})


@pytest.mark.parametrize("order", [("input_ids", "attention_mask"), ("attention_mask", "input_ids")])
def test_each_row_must_contain_the_required_token(order: tuple[str, str]) -> None:
    ids = torch.tensor([[5, 2, 2, 6], [5, 7, 2, 1], [5, 7, 8, 2]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0]])
    feeds = {"input_ids": ids, "attention_mask": mask}

    def messages_for(*, equal_counts: bool, rows: int) -> list[str]:
        specs = {"input_ids": TensorSpec("input_ids", "int64", AXES, required=2, equal_counts=equal_counts)}
        specs["attention_mask"] = TensorSpec("attention_mask", "int64", AXES, role="mask")
        check = InputValueCheck([specs[name] for name in order])
        return errors(check, {name: feeds[name][:rows] for name in order})

    assert messages_for(equal_counts=False, rows=2) == []
    # In the last row, the attention mask hides the required token.
    assert [message[:45] for message in messages_for(equal_counts=False, rows=3)] == [
        "Row 2 of the input 'input_ids' does not conta"
    ] * 2
    assert messages_for(equal_counts=True, rows=1) == []
    assert all(
        "contain the token 2 between 1 and 2 times" in message for message in messages_for(equal_counts=True, rows=2)
    )
    assert len(messages_for(equal_counts=True, rows=2)) == 2
