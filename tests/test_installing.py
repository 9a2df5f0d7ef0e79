"""A wheel installs beside what is there, replaces nothing, and says what is too old."""

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shardglass import ConfigError, versions

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]


def pip(*words):
    done = subprocess.run([*PIP, *words], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), ".")
    (built,) = folder.glob("shardglass-*.whl")
    return built


def test_installing_the_wheel_replaces_no_package_that_is_there(wheel, tmp_path):
    report = tmp_path / "report.json"
    pip("install", "--dry-run", "--no-index", "--ignore-installed", "--no-deps", "--report", str(report), str(wheel))
    metadata = json.loads(report.read_text())["install"][0]["metadata"]
    needs = [Requirement(line) for line in metadata["requires_dist"] if "extra ==" not in line]
    assert {"torch", "transformers", "accelerate"} <= {need.name for need in needs}
    assert all(specifier.operator == ">=" for need in needs for specifier in need.specifier)
    pip("install", "--dry-run", "--no-index", "--upgrade", "--report", str(report), str(wheel))
    assert [row["metadata"]["name"] for row in json.loads(report.read_text())["install"]] == ["shardglass"]


def test_the_installed_wheel_answers_and_has_what_it_needs(wheel, tmp_path):
    pip("install", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel))
    code = "import shardglass, shardglass.hf.trainer as t; print(shardglass.__file__, shardglass.shard.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.split() == [str(tmp_path / "site" / "shardglass" / "__init__.py"), "shard"]
    names = zipfile.ZipFile(wheel).namelist()
    assert "shardglass/py.typed" in names
    assert not any(name.startswith(("tests/", "bench/", "examples/")) for name in names)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("torch>=99", f"torch {importlib.metadata.version('torch')} is installed and shardglass needs >=99"),
        ("no-such-package>=1", "no-such-package is not installed and shardglass needs no-such-package>=1"),
        ("torch>=99; python_version < '3.0'", None),
        ("deepspeed>=0.19; extra == 'deepspeed'", None),
        ("torch>=2", None),
    ],
)
def test_a_version_that_is_too_old_is_named(line, told):
    assert versions.version_fault(line) == told


def test_all_that_is_too_old_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setattr(versions, "requires", lambda name: ["torch>=99", "rich>=99; python_version > '3'", "typer>=0"])
    with pytest.raises(ConfigError) as caught:
        versions.check_versions()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith("mend it with: pip install 'torch>=99' 'rich>=99'")
    assert text.count("is installed and shardglass needs >=99") == 2


def test_what_is_installed_here_is_recent_enough():
    versions.check_versions()


def test_a_script_under_torchrun_ends_with_the_one_line(tmp_path):
    site = tmp_path / "shardglass-9.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: shardglass\nVersion: 9\nRequires-Dist: torch>=99\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "qwen" / "finetune.py")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}", "RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("shardglass: torch ")
    assert "is installed and shardglass needs >=99; mend it with: pip install 'torch>=99'" in done.stderr
    assert "Traceback" not in done.stderr
