"""Tests of the `cuda` backend without a GPU: options, availability on simulated machines, and the graph form for each
kind of mask.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.backends import registry
from accel.backends.plan import Selection, SelectionRequest
from accel.backends.plan import select as select_backend
from accel.backends.stage_backend_selection import plan_stage
from accel.errors import BackendUnavailableError, ConfigError
from accel.interfaces.specs import DeviceSpec, Probe, Reason
from accel_plugins.cuda import SPEC
from accel_plugins.cuda.backend import CudaBackend
from accel_plugins.cuda.forms.packing import FIRST, INDEX, OFFSETS, POSITIONS, STARTS, PackingInputs, packed_rows
from accel_plugins.cuda.forms.padding_variants import MaskContent, MaskPlan, mask_content, plan_for
from accel_plugins.cuda.options import read_options
from accel_plugins.ortkit.runtime.nvidia import NvidiaFacts, judge, visible

GPU = DeviceSpec("cuda", 0, name="NVIDIA H200", arch="sm_90", memory_bytes=150 << 30)
HEALTHY: dict[str, Any] = {
    "providers": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "distributions": {"onnxruntime-gpu": "1.31.1"},
    "build_cuda": "13.0",
    "driver": "580.159",
    "driver_cuda": (13, 0),
    "gpus": (GPU,),
    "torch_cuda": "13.0",
}
CPU_BUILD = {"providers": ("CPUExecutionProvider",), "build_cuda": None}


def verdict(**changes: Any) -> Probe:
    return judge(NvidiaFacts(**{**HEALTHY, **changes}))


# The tests below check the availability probe.


def test_machine_with_gpu_is_available() -> None:
    probe = verdict()
    assert probe.devices == (GPU,)
    assert not probe.reasons
    assert probe.versions == {"onnxruntime-gpu": "1.31.1", "driver": "580.159", "cuda": "13.0", "torch-cuda": "13.0"}


@pytest.mark.parametrize(
    ("changes", "code", "message", "remedy"),
    [
        ({**CPU_BUILD, "distributions": {"onnxruntime": "1.31.1"}}, "no-gpu-build", "onnxruntime 1.31.1", "[cuda]"),
        (
            {**CPU_BUILD, "distributions": {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}},
            "cpu-build-hides-gpu-build",
            "both installed",
            "pip uninstall -y onnxruntime onnxruntime-gpu",
        ),
        ({"driver": None, "driver_cuda": None, "gpus": ()}, "no-driver", "no NVIDIA driver", "--gpus all"),
        ({"gpus": ()}, "no-gpu", "580.159 finds no GPU", "CUDA_VISIBLE_DEVICES"),
        (
            {"driver": "550.54", "driver_cuda": (12, 4)},
            "driver-too-old",
            "needs CUDA 13.0",
            "driver that supports CUDA 13",
        ),
        ({"torch_cuda": None}, "torch-without-cuda", "has no CUDA support", "pip install torch"),
        (
            {"load_error": "libcudnn.so.9: cannot open shared object file: No such file or directory"},
            "library",
            "libcudnn.so.9 is missing",
            "onnxruntime-gpu[cuda,cudnn]",
        ),
    ],
)
def test_each_missing_requirement_has_reason_and_remedy(
    changes: dict[str, Any], code: str, message: str, remedy: str
) -> None:
    probe = verdict(**changes)
    assert not probe.available
    assert [reason.code for reason in probe.reasons] == [code]
    assert message in probe.reasons[0].message
    assert remedy in probe.reasons[0].remedy


def test_all_reasons_are_given_at_once() -> None:
    probe = verdict(**CPU_BUILD, distributions={"onnxruntime": "1.31.1"}, driver=None, gpus=(), torch_cuda=None)
    assert [reason.code for reason in probe.reasons] == ["no-gpu-build", "no-driver", "torch-without-cuda"]


def test_newer_minor_version_is_accepted() -> None:
    assert verdict(build_cuda="13.2", torch_cuda="13.1").available


def test_this_machine_has_devices_or_reasons() -> None:
    probe = CudaBackend().probe()
    assert bool(probe.devices) != bool(probe.reasons)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("1,7,0", [1]), ("GPU-5f3c", [-1]), ("-1", [])],
)
def test_visible_devices(value: str | None, expected: list[int]) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible(3, environment) == expected


# The tests below check which backend is selected.


def select(probe: Probe, **requirements: Any) -> Selection:
    probes = {"cpu": Probe(devices=(DeviceSpec("cpu"),)), "cuda": probe}
    inventory = registry.Inventory(
        specs=(registry.describe("cpu"), SPEC), probe=lambda spec: probes[spec.name], missing=lambda spec: None
    )
    named = inventory.spec(requirements.pop("backend")) if "backend" in requirements else None
    question = {"format": "onnx", "task": "text-classification", "dtype": "float32", **requirements}
    return select_backend(SelectionRequest(**question), inventory, named)


def test_gpu_is_preferred_to_cpu() -> None:
    assert (selection := select(verdict())).backend == "cuda"
    assert selection.device == GPU


def test_cpu_is_selected_without_gpu() -> None:
    assert select(Probe(reasons=(Reason("no-driver", "there is no NVIDIA driver", "install it"),))).backend == "cpu"


def test_named_cuda_backend_without_gpu_selects_nothing() -> None:
    selection = select(verdict(driver=None, gpus=()), backend="cuda")
    assert selection.backend is None
    assert "there is no NVIDIA driver (install the NVIDIA driver" in str(selection)


def test_onnx_is_optimized_by_cpu_backend_by_default() -> None:
    assert plan_stage("optimize", "onnx").backend.name == "cpu"
    assert plan_stage("optimize", "onnx", "cuda").backend.name == "cuda"
    with pytest.raises(
        BackendUnavailableError, match=r"(?s)exports no models; it runs artifacts of the format onnx.*without backend"
    ):
        plan_stage("export", None, "cuda")
    assert registry.describe("CUDAExecutionProvider") is SPEC


# The tests below check options.


def test_default_options() -> None:
    options = read_options({}, GPU)
    assert (options.cuda_graphs, options.padding, options.tf32) == (16, "check", False)
    assert options.provider == {"device_id": "0", "use_tf32": "0"}


def test_onnx_runtime_options_are_passed_on() -> None:
    provider_options = {
        "gpu_mem_limit": 1 << 30,
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": True,
        "prefer_nhwc": True,
    }
    options = read_options({**provider_options, "device_id": "1"}, DeviceSpec("cuda", 1))
    assert options.tf32
    assert options.provider == {
        "gpu_mem_limit": "1073741824",
        "arena_extend_strategy": "kSameAsRequested",
        "prefer_nhwc": "1",
        "device_id": "1",
        "use_tf32": "1",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_mem_limt": 1}, "Did you mean 'gpu_mem_limit'"),
        ({"device_id": 1}, "contradicts the device cuda:0"),
        ({"enable_cuda_graph": 1}, "cuda_graphs=0"),
        ({"user_compute_stream": 7}, "current stream"),
        ({"packing": "sometimes"}, "True or False"),
        ({"padding": "rigth"}, "Did you mean 'right'"),
        ({"cuda_graphs": -1}, "whole number"),
        ({"use_tf32": "perhaps"}, "True or False"),
    ],
)
def test_invalid_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_options(options, GPU)
    assert message in str(raised.value)


# The tests below check which graph form (`full`, `lengths` or `general`) fits a mask.

MASKS = {
    "full": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "lengths": [[1, 1, 1, 1], [1, 0, 0, 0]],
    "left": [[1, 1, 1, 1], [0, 0, 1, 1]],
    "hole": [[1, 1, 1, 1], [1, 0, 1, 1]],
    "empty": [[1, 1, 1, 1], [0, 0, 0, 0]],
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("kind", MASKS)
def test_form_for_a_mask(kind: str, dtype: torch.dtype) -> None:
    mask = torch.tensor(MASKS[kind]).to(dtype)
    expected = kind if kind in ("full", "lengths") else "general"
    assert mask_content(mask) == MaskContent(expected, int(mask.sum()))  # type: ignore[arg-type]


def test_form_for_every_small_mask() -> None:
    forms = set()
    for number in range(2**8):
        mask = torch.tensor([(number >> i) & 1 for i in range(8)]).view(2, 4)
        rows = ["".join(map(str, row)) for row in mask.tolist()]
        expected = "general"
        if all(row in ("1000", "1100", "1110", "1111") for row in rows):
            expected = "full" if rows == ["1111", "1111"] else "lengths"
        assert mask_content(mask).form == expected, rows
        forms.add(expected)
    assert forms == {"full", "lengths", "general"}


def test_nonzero_mask_values_keep_a_token() -> None:
    assert mask_content(torch.tensor([[5, 5, -1, 0]])) == MaskContent("lengths", 3)


# The tests below check packing, which skips padding tokens.


@pytest.mark.parametrize(
    ("content", "shape", "packs", "short", "expected"),
    [
        (MaskContent("lengths", 4000), (16, 384), True, True, MaskPlan("packed", 4224)),
        (MaskContent("lengths", 4000), (16, 384), False, True, MaskPlan("lengths")),
        (MaskContent("lengths", 4700), (16, 384), True, True, MaskPlan("lengths")),
        (MaskContent("full", 6144), (16, 384), True, True, MaskPlan("full")),
        (MaskContent("general", 3000), (16, 384), True, True, MaskPlan("general")),
        (MaskContent("lengths", 200), (33, 31), True, True, MaskPlan("lengths")),
        (MaskContent("full", 64), (1, 64), True, True, MaskPlan("short")),
        (MaskContent("full", 64), (1, 64), True, False, MaskPlan("full")),
        (MaskContent("full", 65), (1, 65), True, True, MaskPlan("full")),
        (MaskContent("lengths", 60), (1, 64), True, True, MaskPlan("lengths")),
    ],
)
def test_fastest_plan_for_a_mask(
    content: MaskContent, shape: tuple[int, int], packs: bool, short: bool, expected: MaskPlan
) -> None:
    assert plan_for(content, shape, packs=packs, short=short) == expected


def test_number_of_packed_row_sizes_is_small() -> None:
    for places in (2048, 6144, 8191, 30_000):
        sizes = {packed_rows(tokens, places) for tokens in range(1, places + 1)}
        assert len(sizes) <= 16
        assert all(tokens <= packed_rows(tokens, places) <= places for tokens in range(1, places + 1))


def test_packing_indices() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
    packing = PackingInputs((3, 4), 8, torch.device("cpu"))
    for _ in range(2):
        packing.fill(mask)
    indices = {name: tensor.tolist() for name, tensor in packing.inputs.items()}
    assert indices[STARTS] == [0, 3, 4, 6]
    assert indices[FIRST] == [0, 3, 4]
    assert indices[INDEX][:6] == [0, 1, 2, 4, 8, 9]
    offsets = packing.inputs[OFFSETS].flatten().tolist()
    assert sorted(offsets) == list(range(12))
    assert offsets[:8] == indices[INDEX]
    positions = torch.tensor(indices[POSITIONS])
    assert positions[mask.bool()].tolist() == list(range(6))
    assert positions.max() < 8
