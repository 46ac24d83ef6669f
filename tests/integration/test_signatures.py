"""Signed artifacts: the package `model-signing` accepts our signatures, and changed folders are refused."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf import json_format
from typer.testing import CliRunner

from accel import ORTModelForSequenceClassification
from accel.artifact import Artifact
from accel.artifact.manifest import FastestRunSettings
from accel.artifact.provenance import bill_of_materials, in_toto_statement, measured_numbers
from accel.artifact.signatures import MATERIALS, REQUIREMENT, SIGNATURE, STATEMENT
from accel.artifact.signing import sign
from accel.cli import app
from accel.errors import ConfigError, IntegrityError
from accel.testing.copies_without_manifest import as_foreign, edit_manifest


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a private and a public key."""
    folder = tmp_path_factory.mktemp("keys")
    private = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    (folder / "private.pem").write_bytes(
        private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "public.pem").write_bytes(
        private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return folder / "private.pem", folder / "public.pem"


@pytest.fixture
def signed(tmp_path: Path, tiny_artifact: Callable[..., Artifact], keys: tuple[Path, Path]) -> Path:
    """Return a signed copy of an artifact."""
    folder = tmp_path / "signed"
    shutil.copytree(tiny_artifact().path, folder)
    sign(folder, key=keys[0])
    return folder


@pytest.fixture
def required(keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Require signatures in this process, and return the public key."""
    monkeypatch.setenv(REQUIREMENT, str(keys[1]))
    return keys[1]


def test_model_signing_accepts_the_signature(signed: Path, keys: tuple[Path, Path]) -> None:
    command = [
        *(sys.executable, "-m", "model_signing", "verify", "key", str(signed)),
        *("--signature", str(signed / SIGNATURE), "--public_key", str(keys[1])),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (signed / "config.json").write_text("{}", encoding="utf-8")
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_a_signed_artifact_opens(signed: Path, required: Path) -> None:
    ORTModelForSequenceClassification.from_pretrained(signed)


def _changed_number(folder: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["steps"][0]["validation"]["max_abs_difference"] = 0.0

    edit_manifest(folder, change)


def _changed_name(folder: Path) -> None:
    (folder / STATEMENT).rename(folder / "statement.json")


@pytest.mark.parametrize(
    "change",
    [
        _changed_number,
        _changed_name,
        lambda folder: (folder / "README.md").write_text("added"),
        lambda folder: (folder / "tokenizer_config.json").unlink(),
        lambda folder: (folder / MATERIALS).write_text("{}"),
    ],
    ids=["number", "name", "added", "removed", "statement"],
)
def test_a_changed_folder_is_refused(change: Callable[[Path], object], signed: Path, required: Path) -> None:
    change(signed)
    with pytest.raises(IntegrityError, match="The signature of .* is not valid"):
        Artifact.load(signed)


def test_unsigned_folders_are_refused(
    tmp_path: Path, tiny_artifact: Callable[..., Artifact], tiny_folder: Callable[..., Path], required: Path
) -> None:
    artifact = Path(str(tiny_folder())).with_name("bert-text-classification-onnx")
    foreign = as_foreign(artifact, tmp_path / "foreign")
    for folder in (artifact, foreign):
        with pytest.raises(IntegrityError, match="is not signed"):
            ORTModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(IntegrityError, match="is not signed"):
        ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")


def test_the_signature_of_another_key_is_refused(signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    pem = other.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "other.pem").write_bytes(pem)
    monkeypatch.setenv(REQUIREMENT, str(tmp_path / "other.pem"))
    with pytest.raises(IntegrityError, match="The signature of .* is not valid"):
        Artifact.load(signed)
    monkeypatch.setenv(REQUIREMENT, str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match="does not exist"):
        Artifact.load(signed)


def test_the_command_line_signs_and_requires(
    tmp_path: Path, tiny_artifact: Callable[..., Artifact], keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REQUIREMENT, "")  # the command sets the variable in this process; this removes it after the test
    folder = tmp_path / "copy"
    shutil.copytree(tiny_artifact().path, folder)
    here = ["validate", str(folder), "--here", "--require-signature", str(keys[1])]
    assert "is not signed" in CliRunner().invoke(app, here).output
    monkeypatch.setenv(REQUIREMENT, "")
    result = CliRunner().invoke(app, ["sign", str(folder), "--key", str(keys[0])])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, here).exit_code == 0
    # A signed artifact can be signed again, and its files can be accepted again.
    Artifact.accept_files(folder)
    sign(folder, key=keys[0])
    assert CliRunner().invoke(app, here).exit_code == 0


def test_a_bad_key_is_an_error(tmp_path: Path, tiny_artifact: Callable[..., Artifact]) -> None:
    shutil.copytree(tiny_artifact().path, tmp_path / "copy")
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(ConfigError, match="cannot be signed"):
        sign(tmp_path / "copy", key=tmp_path / "key.pem")


def measured(artifact: Artifact) -> Artifact:
    """Return an artifact with the numbers of a quantization and of a search."""
    accuracy = {
        "metric": "accuracy", "value": 0.91, "float": 0.92, "drop": 1.0, "drop_interval": [0.2, 1.8],
        "data": {"source": "/data/test.csv", "n": 400}, "batch_size": 1,
    }  # fmt: skip
    step = artifact.manifest.steps[-1]
    run = FastestRunSettings(
        backend="cpu",
        measured={
            "metric": "accuracy",
            "value": 0.91,
            "rows": 400,
            "median_ms": {"1x128": 5.5},
            "pytorch_float32_ms": {"1x128": 11},
        },
    )
    steps = (*artifact.manifest.steps[:-1], replace(step, validation={**step.validation, "accuracy": accuracy}))
    return replace(artifact, manifest=replace(artifact.manifest, steps=steps, run=run))


def test_the_statement_is_valid_and_contains_the_numbers(tiny_artifact: Callable[..., Artifact]) -> None:
    artifact = measured(tiny_artifact())
    values = in_toto_statement(artifact)
    statement = importlib.import_module("in_toto_attestation.v1.statement").Statement([], "", {})
    json_format.Parse(json.dumps(values), statement.pb)
    statement.validate()
    names = {subject["name"]: subject["digest"]["sha256"] for subject in values["subject"]}
    assert names["model.onnx"] == artifact.components[0].files[0].sha256
    assert "accel.json" in names
    numbers = {n["name"]: n for n in values["predicate"]["runDetails"]["byproducts"][0]["annotations"]["numbers"]}
    assert (numbers["drop of accuracy"]["low"], numbers["drop of accuracy"]["high"]) == (0.2, 1.8)
    assert numbers["median latency of 1x128"]["value"] == 5.5
    assert "400 rows of test.csv" in numbers["drop of accuracy"]["conditions"]
    assert str(artifact.path.parent) not in json.dumps(values), "the statement contains a path of this machine"


def test_the_bill_of_materials_lists_files_and_libraries(tiny_artifact: Callable[..., Artifact]) -> None:
    values = bill_of_materials(measured(tiny_artifact()))
    assert (values["bomFormat"], values["specVersion"]) == ("CycloneDX", "1.6")
    libraries = {entry["name"] for entry in values["components"] if entry["type"] == "library"}
    assert {"torch", "transformers"} <= libraries
    references = [entry["bom-ref"] for entry in values["components"]]
    assert len(set(references)) == len(references)
    metrics = values["metadata"]["component"]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert {"lowerBound": "0.2", "upperBound": "1.8"} in [metric.get("confidenceInterval") for metric in metrics]


def test_all_statements_use_the_same_numbers(tiny_artifact: Callable[..., Artifact]) -> None:
    artifact = measured(tiny_artifact())
    names = [number.name for number in measured_numbers(artifact.manifest)]
    assert names[:1] == ["largest difference of export"]
    assert {"accuracy", "drop of accuracy", "median latency of 1x128"} <= set(names)
    model = ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path)
    model.artifact = artifact
    card = model.model_card("org/model")
    assert "| drop of accuracy | 1 points (95 % interval 0.2 to 1.8) | 400 rows of test.csv |" in card
    assert "| median latency of 1x128 | 5.5 ms |" in card


def test_saved_models_have_a_card_with_the_same_numbers(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    model = ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path)
    model.artifact = measured(tiny_artifact())
    model.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "| drop of accuracy | 1 points (95 % interval 0.2 to 1.8) | 400 rows of test.csv |" in card
    assert "onnxruntime " in card
    assert "The accuracy was not measured" not in card
    assert str(Path(str(model.artifact.manifest.source.id)).parent) not in card  # type: ignore[union-attr]
    assert "The accuracy was not measured" in ORTModelForSequenceClassification.from_pretrained(
        tiny_artifact().path
    ).model_card("x")


def test_a_card_of_somebody_else_is_kept(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    model = ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path)
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "README.md").write_text("Written by hand.")
    model.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "Written by hand."
    (folder / "README.md").unlink()
    model.save_pretrained(folder, overwrite=True)
    assert "# saved" in (folder / "README.md").read_text()
    model.save_pretrained(folder, overwrite=True)


def test_triton_repositories_have_a_card(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    pytest.importorskip("tritonclient")
    from accel.deploying.triton.repository import deploy

    repository = deploy(tiny_artifact(), tmp_path / "models", name="labels")
    card = (repository.path / "labels" / "README.md").read_text()
    assert "| largest difference of export |" in card
    assert "tritonserver --model-repository models" in card
