"""The contract of backends as a test suite. The suite is a single file, so that plugin authors can read the complete contract.

The suite is part of the wheel. It tests the capabilities that a backend declares, and does not depend on a particular backend.

A plugin runs the suite with these five lines:

    from accel.testing.conformance import BackendConformance

    class TestMyBackend(BackendConformance):
        backend = "mine"

Tests of a capability that the backend does not declare are skipped with a reason.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from accel.artifact.manifest import Artifact
from accel.backends import registry
from accel.config import PrepareConfig
from accel.errors import ConfigError, InputError, SessionClosedError
from accel.interfaces.protocols import (
    Backend,
    OpenRequest,
    Preparer,
    PreparingBackend,
    Session,
)
from accel.interfaces.specs import BackendSpec, Capability, DeviceSpec, Probe
from accel.interfaces.state import State
from accel.stages.export import export

from .models import tiny_model


class BackendConformance:
    """The conformance tests of a backend. Subclass it, set `backend`, and run it with pytest.

    Attributes:
        backend: Name of the backend.
        device: Device for the tests; the first available device when `None`.
        tolerance: Largest accepted absolute difference from PyTorch in float32.
        artifact_format: Format to export if the backend has no exporter.
    """

    backend: ClassVar[str]
    device: ClassVar[str | None] = None
    tolerance: ClassVar[float] = 1e-4
    artifact_format: ClassVar[str] = "onnx"

    # Fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls) -> BackendSpec:
        """The spec of the plugin."""
        return registry.describe(cls.backend)

    @pytest.fixture(scope="class")
    @classmethod
    def run_capability(cls, spec: BackendSpec, artifact: Artifact) -> Capability:
        """The declared capability to run the format of the artifact."""
        capability = spec.capability("run", artifact.format)
        assert capability is not None, f"{spec.name} declares no capability to run {artifact.format}"
        return capability

    @pytest.fixture(scope="class")
    @classmethod
    def implementation(cls, spec: BackendSpec) -> Backend:
        """The implementation of the backend; skip the test if the backend is not available."""
        probe = registry.probe(spec)
        if not probe.available:
            pytest.skip(
                f"the backend {spec.name} is not available on this machine: {'; '.join(map(str, probe.reasons))}"
            )
        return registry.load(spec)

    @pytest.fixture(scope="class")
    @classmethod
    def where(cls, spec: BackendSpec, implementation: Backend) -> DeviceSpec:
        """The device for the tests."""
        devices = registry.probe(spec).devices
        if cls.device is None:
            return devices[0]
        return next(device for device in devices if str(device) == cls.device)

    @pytest.fixture(scope="class")
    @classmethod
    def original(cls) -> Any:
        """The PyTorch model that is exported to the artifact."""
        return tiny_model("bert")

    @pytest.fixture(scope="class")
    @classmethod
    def artifact(cls, spec: BackendSpec, original: Any, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
        """A tiny classifier in the format of the backend."""
        formats = [c.produces for c in spec.capabilities if c.stage == "export" and c.produces]
        folder = tmp_path_factory.mktemp("conformance") / "artifact"
        backend = cls.backend if formats else None
        return export(original, folder, backend=backend, format=formats[0] if formats else cls.artifact_format)

    @pytest.fixture
    def session(self, implementation: Backend, artifact: Artifact, where: DeviceSpec) -> Iterator[Session]:
        """A new session of the artifact."""
        opened = self.open(implementation, artifact, where)["model"]
        yield opened
        opened.close()

    def open(
        self, implementation: Backend, artifact: Artifact, where: DeviceSpec, shapes: Mapping[str, int] | None = None
    ) -> Mapping[str, Session]:
        """Open the artifact. Override this method to pass options."""
        return implementation.open(artifact, OpenRequest(device=where, shapes=shapes or {}))

    @staticmethod
    def feeds(session: Session, batch: int = 2, sequence: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return inputs of shape `(batch, sequence)` for a tiny model, with padding in the last row and without cache
        tensors.
        """
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, 100, (batch, sequence), generator=generator)
        mask = torch.ones_like(ids)
        mask[-1, sequence // 2 + 1 :] = 0
        ids[mask == 0] = 0
        types = torch.randint(0, 2, ids.shape, generator=generator)
        positions = torch.arange(sequence).repeat(batch, 1)
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "position_ids": positions}
        values["logits_to_keep"] = torch.arange(sequence)
        return {spec.name: values[spec.name] for spec in session.inputs if spec.pair is None}

    # Description and probe

    def test_spec_describes_itself(self, spec: BackendSpec) -> None:
        assert spec.name == self.backend
        assert spec.summary
        assert any(capability.stage == "run" for capability in spec.capabilities), "a backend must run something"

    def test_option_trials_are_recorded_options(self, spec: BackendSpec) -> None:
        tried = {trial.name for capability in spec.capabilities for trial in capability.trials}
        assert tried <= set(spec.recorded_options), "an artifact must record all options with which `tune` measured it"

    def test_probe_gives_devices_or_reasons(self, spec: BackendSpec) -> None:
        probe = registry.probe(spec)
        assert isinstance(probe, Probe)
        assert probe.devices or probe.reasons, "a probe without devices must contain a reason"
        assert all(reason.remedy for reason in probe.reasons if not probe.devices), "each reason needs a remedy"

    # Session.run

    def test_opens_every_component(self, implementation: Backend, artifact: Artifact, where: DeviceSpec) -> None:
        sessions = self.open(implementation, artifact, where)
        assert set(sessions) == {component.name for component in artifact.components}
        for opened in sessions.values():
            assert isinstance(opened, Session)
            opened.close()

    def test_runs_on_the_requested_device(self, session: Session, where: DeviceSpec) -> None:
        assert (session.device.type, session.device.index) == (where.type, where.index)

    def test_parity_with_pytorch(self, session: Session, original: Any) -> None:
        for batch, sequence in [(1, 1), (1, 3), (3, 17), (2, 64)]:
            feeds = self.feeds(session, batch, sequence)
            with torch.inference_mode():
                expected = original(**feeds).logits
            actual = session.run(feeds)["logits"].cpu()
            assert (actual - expected).abs().max() <= self.tolerance

    def test_declares_inputs_and_outputs(self, session: Session, artifact: Artifact) -> None:
        component = artifact.component("model")
        assert [spec.name for spec in session.inputs] == [spec.name for spec in component.inputs]
        assert [spec.name for spec in session.outputs] == [spec.name for spec in component.outputs]
        assert all("batch" in spec.shape for spec in session.inputs)

    def test_missing_input_is_named(self, session: Session) -> None:
        feeds = self.feeds(session)
        name = session.inputs[-1].name
        del feeds[name]
        with pytest.raises(InputError, match=name):
            session.run(feeds)

    def test_extra_input_is_named(self, session: Session) -> None:
        feeds = self.feeds(session)
        feeds["not_an_input"] = torch.zeros(1)
        with pytest.raises(InputError, match="not_an_input"):
            session.run(feeds)

    def test_wrong_rank_is_an_input_error(self, session: Session) -> None:
        feeds = {name: tensor[0] for name, tensor in self.feeds(session).items()}
        with pytest.raises(InputError):
            session.run(feeds)

    def test_contradicting_input_shapes_are_an_input_error(self, session: Session) -> None:
        """A mask with fewer tokens or rows than the token ids raises an error. The next valid call returns correct
        results.
        """
        feeds = self.feeds(session)
        before = session.run(feeds)
        changed = False
        for spec in session.inputs:
            for position, axis in enumerate(spec.shape):
                shared = sum(axis in other.shape for other in session.inputs) > 1
                if isinstance(axis, str) and shared and feeds[spec.name].shape[position] > 1:
                    changed = True
                    for size in (0, 1):
                        with pytest.raises(InputError):
                            session.run({**feeds, spec.name: feeds[spec.name].narrow(position, 0, size)})
        assert changed or len(session.inputs) == 1
        assert torch.equal(session.run(feeds)["logits"], before["logits"])

    def test_values_out_of_bounds_are_an_input_error(self, session: Session) -> None:
        """Values outside the declared bounds of an input raise an error, such as token ids below 0 or above the
        vocabulary.
        """
        feeds = self.feeds(session)
        before = session.run(feeds)
        for spec in session.inputs:
            if spec.bounds is not None:
                for value in (spec.bounds[0] - 1, -100, spec.bounds[1] + 1):
                    wrong = feeds[spec.name].clone()
                    wrong.reshape(-1)[-1] = value
                    with pytest.raises(InputError, match=f"contains the value {value}"):
                        session.run({**feeds, spec.name: wrong})
        assert torch.equal(session.run(feeds)["logits"], before["logits"])

    def test_a_row_without_a_token_is_an_input_error(self, session: Session) -> None:
        """A fully masked row raises an error before the runtime is called; a row with one token is valid."""
        feeds = self.feeds(session, batch=3)
        before = session.run(feeds)
        masks = [spec.name for spec in session.inputs if spec.role == "mask" and spec.bounds is not None]
        assert masks, "masks declare bounds"
        for name in masks:
            for rows in (slice(1, 2), slice(0, 3)):
                hidden = feeds[name].clone()
                hidden[rows] = 0
                with pytest.raises(InputError, match="without tokens"):
                    session.run({**feeds, name: hidden})
                hidden[rows, -1] = 1
                assert bool(session.run({**feeds, name: hidden})["logits"].isfinite().all())
        assert torch.equal(session.run(feeds)["logits"], before["logits"])

    def test_float_for_integer_is_an_input_error(self, session: Session) -> None:
        feeds = self.feeds(session)
        name = session.inputs[0].name
        with pytest.raises(InputError, match=name):
            session.run({**feeds, name: feeds[name].float()})

    def test_accepts_integer_widths(self, session: Session) -> None:
        feeds = self.feeds(session)
        narrow = {name: tensor.to(torch.int32) for name, tensor in feeds.items()}
        assert torch.equal(session.run(narrow)["logits"], session.run(feeds)["logits"])

    def test_accepts_tensors_with_strides(self, session: Session) -> None:
        feeds = self.feeds(session, batch=3)
        strided = {name: tensor.t().contiguous().t() for name, tensor in feeds.items()}
        assert not strided["input_ids"].is_contiguous()
        assert torch.equal(session.run(strided)["logits"], session.run(feeds)["logits"])

    def test_outputs_do_not_alias_the_next_call(self, session: Session) -> None:
        first = session.run(self.feeds(session, seed=1))["logits"]
        snapshot = first.clone()
        session.run(self.feeds(session, seed=2))
        assert torch.equal(first, snapshot)

    def test_repeated_shapes_give_equal_outputs(self, session: Session) -> None:
        shapes = [(1, 5), (3, 5), (1, 5), (2, 7), (1, 5), (3, 5), (1, 5)]
        for seed, (batch, sequence) in enumerate(shapes):
            feeds = self.feeds(session, batch=batch, sequence=sequence)
            feeds["input_ids"] = feeds["input_ids"].roll(seed, dims=1)
            # Outputs requested by name are new buffers, without values of earlier calls.
            alone = session.run(feeds, outputs=[spec.name for spec in session.outputs])
            for name, value in session.run(feeds).items():
                assert (value - alone[name]).abs().max() <= self.tolerance, (batch, sequence, name)

    def test_outputs_keep_the_declared_dtype(self, session: Session) -> None:
        result = session.run(self.feeds(session))
        assert {name: str(t.dtype).removeprefix("torch.") for name, t in result.items()} == {
            spec.name: spec.dtype for spec in session.outputs
        }

    def test_rows_do_not_depend_on_their_batch(self, session: Session) -> None:
        feeds = self.feeds(session, batch=7)
        together = session.run(feeds)["logits"]
        for row in range(7):
            alone = session.run({name: tensor[row : row + 1] for name, tensor in feeds.items()})["logits"]
            assert (alone[0] - together[row]).abs().max() <= self.tolerance

    def test_runs_for_selected_outputs(self, session: Session) -> None:
        assert list(session.run(self.feeds(session), outputs=["logits"])) == ["logits"]
        with pytest.raises(InputError, match="nothing_like_it"):
            session.run(self.feeds(session), outputs=["nothing_like_it"])

    def test_writes_into_buffers_of_the_caller(self, session: Session) -> None:
        feeds = self.feeds(session)
        expected = session.run(feeds)["logits"]
        buffer = torch.full_like(expected, float("nan"))
        result = session.run(feeds, out={"logits": buffer})
        assert result["logits"].data_ptr() == buffer.data_ptr()
        assert torch.equal(buffer, expected)

    def test_several_threads_run_one_session(self, session: Session, run_capability: Capability) -> None:
        if not run_capability.thread_safe:
            pytest.skip(f"the backend {self.backend} does not declare that its sessions are thread-safe")
        cases = [self.feeds(session, batch=1 + i % 3, sequence=3 + i, seed=i) for i in range(8)]
        expected = [session.run(case)["logits"] for case in cases]
        with ThreadPoolExecutor(4) as pool:
            actual = list(pool.map(lambda case: session.run(case)["logits"], cases * 5))
        for have, want in zip(actual, expected * 5, strict=True):
            assert (have - want).abs().max() <= self.tolerance

    def test_compute_dtype_is_the_dtype_of_the_artifact(self, session: Session, artifact: Artifact) -> None:
        assert session.compute_dtype == artifact.dtype == "float32"

    def test_close(self, session: Session) -> None:
        feeds = self.feeds(session)
        session.close()
        session.close()
        with pytest.raises(SessionClosedError):
            session.run(feeds)

    def test_forked_child_discards_the_session(
        self, implementation: Backend, artifact: Artifact, where: DeviceSpec, session: Session
    ) -> None:
        """A forked child process can close the parent's session and open a new one. The child has no threads of the
        parent, so `accel.interfaces.fork_safety` keeps objects whose release would wait for threads.
        """
        if where.type != "cpu" or "fork" not in multiprocessing.get_all_start_methods():
            pytest.skip(
                "this test needs a CPU device and a system with fork; a GPU context cannot be used after a fork"
            )
        feeds = self.feeds(session)
        expected = session.run(feeds)["logits"]

        def child() -> None:
            gc.collect()
            session.close()
            reopened = self.open(implementation, artifact, where)["model"]
            assert (reopened.run(feeds)["logits"] - expected).abs().max() <= self.tolerance

        gc.disable()
        try:
            # Create a reference cycle that contains sessions: only the garbage collector of the child process can release it.
            lost: dict[str, Any] = {"sessions": self.open(implementation, artifact, where)}
            lost["itself"] = lost
            del lost
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
        finally:
            gc.enable()
        process.join(timeout=60)
        process.kill()
        assert process.exitcode == 0

    # Opening

    def test_unknown_option_is_named(self, implementation: Backend, artifact: Artifact, where: DeviceSpec) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            implementation.open(artifact, OpenRequest(device=where, options={"no_such_option": 1}))

    def test_fixed_shapes_compute_the_same(
        self, implementation: Backend, artifact: Artifact, where: DeviceSpec, session: Session
    ) -> None:
        fixed = self.open(implementation, artifact, where, shapes={"batch": 2, "sequence": 8})["model"]
        feeds = self.feeds(session, batch=2, sequence=8)
        assert (fixed.run(feeds)["logits"] - session.run(feeds)["logits"]).abs().max() <= self.tolerance
        fixed.close()

    # Preparation of PyTorch models, for backends that declare it

    def preparation(self, scheme: str) -> PrepareConfig:
        """Return the settings for a scheme of the stage `prepare`. Override this method if the scheme has its own
        settings class.
        """
        return PrepareConfig(scheme=scheme)

    def test_declared_preparers_work(self, spec: BackendSpec, implementation: Backend) -> None:
        """Each declared scheme of `prepare` returns a PyTorch model with the same inputs and outputs."""
        schemes = [scheme for c in spec.capabilities if c.stage == "prepare" for scheme in c.schemes]
        if not schemes:
            pytest.skip(f"the backend {self.backend} declares no scheme of the stage prepare")
        assert isinstance(implementation, PreparingBackend)
        preparer = implementation.preparer()
        assert isinstance(preparer, Preparer)
        with pytest.raises(ConfigError, match="no_such_scheme"):
            preparer.prepare(tiny_model("bert"), config=PrepareConfig(scheme="no_such_scheme"))
        ids = torch.randint(4, 100, (2, 8), generator=torch.Generator().manual_seed(0))
        feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for scheme in schemes:
            model = tiny_model("bert")
            expected = model(**feeds).logits
            prepared = preparer.prepare(model, config=self.preparation(scheme), calibration=self.ranges(scheme, feeds))
            assert isinstance(prepared, torch.nn.Module)
            actual = prepared(**feeds).logits
            assert actual.shape == expected.shape
            assert bool(actual.isfinite().all())

    def ranges(self, scheme: str, feeds: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]] | None:
        """Return calibration data for a scheme of the stage `prepare`. Override this method if the scheme needs
        calibration.
        """
        return None

    # State between calls, for backends that have one

    def stateful_artifact(self, folder: Path) -> Artifact | None:
        """Return an artifact whose sessions have a state, such as a KV cache. Override this method if the backend
        supports states.
        """
        return None

    @pytest.fixture(scope="class")
    @classmethod
    def generating(cls, implementation: Backend, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
        """The artifact that `stateful_artifact` returns, created once per class. If it returns `None`, the test is skipped."""
        artifact = cls().stateful_artifact(tmp_path_factory.mktemp("conformance") / "stateful")
        if artifact is None:
            pytest.skip(f"the tests of {cls.backend} do not override stateful_artifact")
        return artifact

    @pytest.fixture
    def stateful(self, implementation: Backend, generating: Artifact, where: DeviceSpec) -> Iterator[Session]:
        """A new session with a state."""
        opened = self.open(implementation, generating, where)["model"]
        yield opened
        opened.close()

    def _continue(self, session: Session, state: State, feeds: Mapping[str, torch.Tensor], cut: slice) -> torch.Tensor:
        part = self._part(feeds, cut, state.length)
        logits = session.run(part, outputs=("logits",), state=state)["logits"]
        # Return the logits of the last token only.
        return logits[:, -1] if logits.ndim == 3 else logits

    @staticmethod
    def _part(feeds: Mapping[str, torch.Tensor], cut: slice, cached: int) -> dict[str, torch.Tensor]:
        """Return the inputs of the new tokens, which follow the `cached` tokens of a state. The mask covers old and new tokens."""
        new = cut.stop - cut.start
        return {
            name: tensor[:new]
            if name == "logits_to_keep"
            else tensor[:, : cached + new]
            if name == "attention_mask"
            else tensor[:, cut]
            for name, tensor in feeds.items()
        }

    def _left_padded(self, session: Session) -> dict[str, torch.Tensor]:
        """Return two rows of eight tokens. Padding is on the left, because the logits of padding tokens are undefined."""
        feeds = self.feeds(session, batch=2, sequence=8)
        feeds["attention_mask"] = feeds["attention_mask"].flip(1)
        return feeds

    def test_state_continues_a_sequence(self, stateful: Session) -> None:
        feeds = self._left_padded(stateful)
        state = stateful.new_state(2)
        assert isinstance(state, State)
        assert state.length == 0
        uninterrupted = self._continue(stateful, stateful.new_state(2), feeds, slice(0, 8))
        self._continue(stateful, state, feeds, slice(0, 5))
        assert state.length == 5
        resumed = self._continue(stateful, state, feeds, slice(5, 8))
        assert state.length == 8
        assert (uninterrupted - resumed).abs().max() <= self.tolerance

    def test_steps_equal_runs(self, stateful: Session) -> None:
        """Prepared steps (`Session.steps`) return the same results as `run`, for rows with left padding."""
        feeds = self._left_padded(stateful)
        plain, state = stateful.new_state(2), stateful.new_state(2)
        for each_state in (plain, state):
            self._continue(stateful, each_state, feeds, slice(0, 7))
        last = self._part(feeds, slice(7, 8), 7)
        for each_state in (plain, state):
            stateful.run(last, outputs=("logits",), state=each_state)
        step = stateful.steps(last, state, calls=20)
        if step is None:
            pytest.skip(f"the sessions of {self.backend} have no prepared steps (Session.steps returned None)")
        grown = dict(last)
        for token in range(10):
            for name in grown:
                if name == "attention_mask":
                    grown[name] = torch.cat([grown[name], torch.ones_like(grown[name][:, :1])], dim=1)
                elif name == "position_ids":
                    grown[name] = grown[name] + 1
            grown["input_ids"] = torch.tensor([[token + 3], [token + 5]])
            expected = stateful.run(grown, outputs=("logits",), state=plain)["logits"]
            actual = torch.from_numpy(step(grown["input_ids"][:, 0].tolist()))
            assert state.length == plain.length
            assert (actual - (expected[:, -1] if expected.ndim == 3 else expected)).abs().max() <= self.tolerance

    def test_state_clones_and_crops(self, stateful: Session) -> None:
        feeds = self._left_padded(stateful)
        state = stateful.new_state(2)
        self._continue(stateful, state, feeds, slice(0, 5))
        copy = state.clone()
        expected = self._continue(stateful, copy, feeds, slice(5, 8))
        assert (copy.length, state.length) == (8, 5), "a clone must not move its original"
        self._continue(stateful, state, feeds, slice(0, 2))
        state.crop(5)
        assert state.length == 5
        assert (self._continue(stateful, state, feeds, slice(5, 8)) - expected).abs().max() <= self.tolerance

    def test_state_reorders(self, stateful: Session) -> None:
        feeds = self._left_padded(stateful)
        swapped = {name: tensor.flip(0) if tensor.ndim > 1 else tensor for name, tensor in feeds.items()}
        state = stateful.new_state(2)
        self._continue(stateful, state, feeds, slice(0, 5))
        state.reorder(torch.tensor([1, 0]))
        actual = self._continue(stateful, state, swapped, slice(5, 8))
        expected = self._continue(stateful, stateful.new_state(2), swapped, slice(0, 8))
        assert (actual - expected).abs().max() <= self.tolerance

    def test_contradicting_inputs_of_a_step_are_an_input_error(self, stateful: Session) -> None:
        """A step checks the sizes of rows, tokens, positions and requested logits. After an error, the state is
        unchanged.
        """
        feeds = self._left_padded(stateful)
        state = stateful.new_state(2)
        self._continue(stateful, state, feeds, slice(0, 5))
        expected = self._continue(stateful, state.clone(), feeds, slice(5, 8))
        step = {name: tensor[:, 5:8] if tensor.ndim > 1 else tensor[:3] for name, tensor in feeds.items()}
        if "attention_mask" in step:
            step["attention_mask"] = feeds["attention_mask"]
        for spec in stateful.inputs:
            if spec.pair is not None:
                continue
            right = step[spec.name]
            wrong = []
            if spec.name == "logits_to_keep":
                wrong = [torch.tensor([3]), torch.tensor([-1])]
            elif spec.shape[:2] in (("batch", "sequence"), ("batch", "total")):
                longer = torch.cat([right, right[:, :1]], dim=1)
                wrong = [right[:, :0], right[:, :-1], longer, right[:1], right[[0, 1, 1]], right[0]]
            for value in () if spec.bounds is None else (spec.bounds[0] - 1, spec.bounds[1] + 1):
                beyond = right.clone()
                beyond[-1, -1] = value
                wrong.append(beyond)
            for tensor in wrong:
                with pytest.raises(InputError):
                    stateful.run({**step, spec.name: tensor}, outputs=("logits",), state=state)
        assert (state.batch, state.length) == (2, 5)
        assert (self._continue(stateful, state, feeds, slice(5, 8)) - expected).abs().max() <= self.tolerance

    def _alone(self, session: Session, feeds: Mapping[str, torch.Tensor], row: int, length: int) -> torch.Tensor:
        """Return the logits after the first `length` tokens of one row, computed in a separate call."""
        row_feeds = {name: tensor[row : row + 1] if tensor.ndim > 1 else tensor for name, tensor in feeds.items()}
        return self._continue(session, session.new_state(1), row_feeds, slice(0, length))

    def _joined(self, session: Session, feeds: Mapping[str, torch.Tensor], lengths: tuple[int, ...]) -> State:
        """Join single-row states to a state of several rows and return it. Row i of the state has `lengths[i]` tokens."""
        states = []
        for row, length in enumerate(lengths):
            state = session.new_state(1)
            if not state.joinable:
                pytest.skip(f"the states of {self.backend} cannot be joined")
            row_feeds = {name: tensor[row : row + 1] if tensor.ndim > 1 else tensor for name, tensor in feeds.items()}
            self._continue(session, state, row_feeds, slice(0, length))
            states.append(state)
        for state in states[1:]:
            states[0].join(state)
        return states[0]

    @staticmethod
    def _step(
        session: Session, state: State, feeds: Mapping[str, torch.Tensor], rows: list[int], lengths: list[int]
    ) -> torch.Tensor:
        """Run the next token of each row: row i of the state already contains `lengths[i]` tokens. Return the logits."""
        cached = torch.tensor(lengths)
        total = state.length + 1
        step = {}
        for name, tensor in feeds.items():
            if name == "attention_mask":
                step[name] = (torch.arange(total) >= (total - 1 - cached).unsqueeze(1)).long()
            elif name == "logits_to_keep":
                step[name] = tensor[:1]
            else:
                step[name] = torch.stack([tensor[row, n : n + 1] for row, n in zip(rows, lengths, strict=True)])
        logits = session.run(step, outputs=("logits",), state=state)["logits"]
        return logits[:, -1] if logits.ndim == 3 else logits

    def _whole_feeds(self, session: Session, rows: int) -> dict[str, torch.Tensor]:
        feeds = self.feeds(session, batch=rows, sequence=12)
        feeds["attention_mask"] = torch.ones_like(feeds["attention_mask"])
        return feeds

    def test_states_join(self, stateful: Session) -> None:
        """Rows of different lengths are joined to one state, and give the same results as single rows."""
        feeds = self._whole_feeds(stateful, 3)
        lengths = [5, 9, 2]
        state = self._joined(stateful, feeds, (5, 9, 2))
        assert (state.batch, state.length) == (3, 9)
        for _ in range(2):
            actual = self._step(stateful, state, feeds, [0, 1, 2], lengths)
            lengths = [length + 1 for length in lengths]
            for row, length in enumerate(lengths):
                assert (actual[row] - self._alone(stateful, feeds, row, length)[0]).abs().max() <= self.tolerance

    def test_rows_are_removed_from_a_state(self, stateful: Session) -> None:
        """After rows are removed, unused leading positions are dropped, and another row can join."""
        feeds = self._whole_feeds(stateful, 4)
        state = self._joined(stateful, feeds, (5, 9, 2))
        state.reorder(torch.tensor([0, 2]))
        state.drop(4)
        assert (state.batch, state.length) == (2, 5)
        actual = self._step(stateful, state, feeds, [0, 2], [5, 2])
        late = self._joined(stateful, {name: t[3:] if t.ndim > 1 else t for name, t in feeds.items()}, (7,))
        state.join(late)
        actual = self._step(stateful, state, feeds, [0, 2, 3], [6, 3, 7])
        for i, (row, length) in enumerate([(0, 7), (2, 4), (3, 8)]):
            assert (actual[i] - self._alone(stateful, feeds, row, length)[0]).abs().max() <= self.tolerance

    def test_empty_states_do_not_join(self, stateful: Session) -> None:
        state = self._joined(stateful, self._whole_feeds(stateful, 1), (5,))
        for other in (state, stateful.new_state(1)):
            with pytest.raises(InputError):
                state.join(other)
        for columns in (-1, 5):
            with pytest.raises(InputError):
                state.drop(columns)
