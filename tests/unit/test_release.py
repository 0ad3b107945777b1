"""Engine releases: what determines their id, and real builds from wheels that are made here."""

from __future__ import annotations

import base64
import fcntl
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.filter import release_id as id_filter
from ansible_collections.gpuserve.sglang.plugins.module_utils import release as release_module
from ansible_collections.gpuserve.sglang.plugins.module_utils.release import (
    MANIFEST,
    ReleaseBuilder,
    ReleaseError,
    canonical_spec,
    drift,
    explain_drift,
    installed_packages,
    read_manifest,
    release_id,
    without_credentials,
)

PYTHON = str(Path(sys.executable).resolve())
UV = Path(sys.executable).with_name("uv")
SECRET = "s3cret"

STEP: dict[str, Any] = {"name": "engine", "requirements": ["tiny==1.0"]}
SPEC: dict[str, Any] = {"python": "/usr/bin/python3", "steps": [STEP]}


def spec(**changes: Any) -> dict[str, Any]:
    return {**SPEC, **changes}


def step(**changes: Any) -> dict[str, Any]:
    return spec(steps=[{**STEP, **changes}])


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "same",
    [
        spec(index_url="", extra_index_urls=[], find_links=[], offline=False),
        spec(index_url=None, extra_index_urls=None, find_links=None, offline=None),
        step(index_url=None, extra_index_urls=None, no_deps=None, overrides=None),
        step(index_url="", extra_index_urls=[], no_deps=False, overrides=[]),
        step(requirements=["# what serves", "", "  tiny==1.0   # pinned", "#end"]),
        step(requirements=("tiny==1.0",)),
        {"steps": [dict(reversed(STEP.items()))], "python": "/usr/bin/python3"},
        spec(root="/elsewhere", installer="pip", min_free_gb=7.5, imports=["tiny"], torch_cuda="13.0"),
    ],
)
def test_what_does_not_determine_a_release(same: Mapping[str, Any]) -> None:
    assert release_id(same) == release_id(SPEC)
    assert len(release_id(same)) == 12


@pytest.mark.parametrize(
    "other",
    [
        spec(python="/usr/bin/python3.12"),
        spec(index_url="https://mirror/simple"),
        spec(extra_index_urls=["https://mirror/simple"]),
        spec(find_links=["/srv/wheels"]),
        spec(offline=True),
        step(requirements=["tiny==1.1"]),
        step(requirements=["tiny==1.0", "dep==1.0"]),
        step(index_url="https://mirror/simple"),
        step(extra_index_urls=["https://mirror/simple"]),
        step(no_deps=True),
        step(overrides=["dep==2.0"]),
        step(requirements=["tiny @ https://host/tiny.whl#sha256=00"]),
        step(requirements=["tiny @ https://host/tiny.whl#sha256=01"]),
        spec(steps=[STEP, {"name": "second", "requirements": ["dep"]}]),
        spec(steps=[{"name": "second", "requirements": ["dep"]}, STEP]),
    ],
    ids=str,
)
def test_what_determines_a_release(other: Mapping[str, Any], seen: dict[str, Any]) -> None:
    found = release_id(other)
    assert found != release_id(SPEC)
    assert seen.setdefault(found, other) is other, "two releases with one id"


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return {}


def test_the_id_is_stable() -> None:
    """A new version of the collection must not build every release anew."""
    assert release_id(SPEC) == "5355eb283889"


WITH_CREDENTIALS = [
    lambda who: spec(index_url=f"https://{who}mirror/simple"),
    lambda who: spec(extra_index_urls=["https://a/b", f"https://{who}mirror:8443/simple"]),
    lambda who: spec(find_links=[f"https://{who}mirror/wheels"]),
    lambda who: step(index_url=f"https://{who}mirror/simple"),
    lambda who: step(extra_index_urls=[f"https://{who}mirror/simple"]),
]


@pytest.mark.parametrize("make", WITH_CREDENTIALS)
@pytest.mark.parametrize("who", [f"user:{SECRET}@", f"{SECRET}@", f"user:{SECRET}@tail@", f"u:[{SECRET}#?%40@"])
def test_credentials_determine_nothing_and_are_not_kept(make: Callable[[str], dict[str, Any]], who: str) -> None:
    assert release_id(make(who)) == release_id(make(""))
    assert SECRET not in json.dumps(canonical_spec(make(who)))
    assert "mirror" in json.dumps(canonical_spec(make(who)))


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("https://user:pass@host:8443/a/b?c#d", "https://host:8443/a/b?c#d"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://host", "https://host"),
        ("/srv/wheels@1", "/srv/wheels@1"),
        ("", ""),
    ],
)
def test_without_credentials(url: str, bare: str) -> None:
    assert without_credentials(url) == bare


REFUSED = [
    (spec(python="python3"), "sglang_base_python is 'python3', expected the absolute path"),
    (spec(python=None), "sglang_base_python is '', expected the absolute path"),
    (spec(steps=[]), "sglang_steps is empty, expected a list"),
    (spec(steps=None), "sglang_steps is empty, expected a list"),
    (spec(steps=f"https://u:{SECRET}@h"), "sglang_steps is a str, expected a list"),
    (spec(steps={"name": SECRET}), "sglang_steps is a dict, expected a list"),
    (spec(steps=[f"tiny --index-url https://u:{SECRET}@h"]), "sglang_steps[0] is a str, expected a dictionary"),
    (step(name=None, index_url=f"https://u:{SECRET}@h"), "sglang_steps[0] has the name ''"),
    (step(name="../x"), "sglang_steps[0] has the name '../x'"),
    (step(name="a\n"), "sglang_steps[0] has the name 'a\\n'"),
    (spec(steps=[STEP, STEP]), "sglang_steps[1] has the name 'engine' of an earlier step"),
    (step(indexurl=f"https://u:{SECRET}@h", pre=1), "sglang_steps[0] (engine) has the unknown keys indexurl, pre;"),
    (step(requirements=[]), "sglang_steps[0] (engine) lists no requirements"),
    (step(requirements=None), "sglang_steps[0] (engine) lists no requirements"),
    (step(requirements=["# nothing", " "]), "sglang_steps[0] (engine) lists no requirements"),
    (step(requirements="tiny==1.0"), "sglang_steps[0] (engine).requirements is a str, expected a list"),
    (step(extra_index_urls=f"https://u:{SECRET}@h"), "(engine).extra_index_urls is a str, expected a list"),
    (step(overrides="a==1"), "(engine).overrides is a str, expected a list"),
    (step(no_deps="no"), "sglang_steps[0] (engine).no_deps is 'no', expected true or false"),
    (spec(offline="yes"), "sglang_offline is 'yes', expected true or false"),
    (spec(find_links="/srv/wheels"), "sglang_find_links is a str, expected a list"),
    (spec(find_links=["wheels"]), "sglang_find_links names 'wheels', expected an absolute path or an address"),
    (spec(extra_index_urls="https://h"), "sglang_extra_index_urls is a str, expected a list"),
    (step(requirements=[f"--index-url=https://u:{SECRET}@h"]), "(engine).requirements holds the option --index-url,"),
    (step(requirements=["-r other.txt"]), "(engine).requirements holds the option -r,"),
    (step(overrides=["-c other.txt"]), "(engine).overrides holds the option -c,"),
    (
        step(requirements=[f"tiny @ https://u:{SECRET}@h/tiny.whl"]),
        "(engine).requirements holds credentials in the address of tiny @ https://***@h/tiny.whl,",
    ),
    (spec(index_url=f"https://u:a/{SECRET}@h/simple"), "sglang_index_url holds an @ behind the host"),
    (step(index_url=f"https://u:a/{SECRET}@h/simple"), "sglang_steps[0] (engine).index_url holds an @"),
    (step(extra_index_urls=[f"https://u:a/{SECRET}@h"]), "(engine).extra_index_urls holds an @"),
    (spec(find_links=[f"https://u:a/{SECRET}@h"]), "sglang_find_links holds an @"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[message for _spec, message in REFUSED])
def test_refused_descriptions(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        release_id(wrong)
    assert message in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_key_of_a_repository_is_no_secret() -> None:
    assert release_id(step(requirements=["tiny @ git+ssh://git@host/tiny@v1"]))


# -- the filter --------------------------------------------------------------------------------------------------------

FILTER = id_filter.FilterModule().filters()["release_id"]


def test_the_filter_gives_the_same_id() -> None:
    assert FILTER(SPEC) == release_id(SPEC)


@pytest.mark.parametrize("value", [[SPEC], "text", None])
def test_the_filter_wants_a_dictionary(value: object) -> None:
    with pytest.raises(AnsibleFilterError) as caught:
        FILTER(value)
    assert str(caught.value) == f"release_id: expected a dictionary, got {type(value).__name__}"


def test_errors_of_the_filter_are_those_of_the_release() -> None:
    with pytest.raises(AnsibleFilterError, match=r"sglang_steps is empty, expected a list"):
        FILTER(spec(steps=[]))


def test_the_filter_is_documented() -> None:
    assert yaml.safe_load(id_filter.DOCUMENTATION)["name"] == "release_id"
    (example,) = yaml.safe_load(id_filter.EXAMPLES)
    assert FILTER(example["vars"]["spec"])


# -- what is there -----------------------------------------------------------------------------------------------------


def test_drift() -> None:
    assert drift({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}) == [
        {"package": "b", "expected": "1", "found": "2"},
        {"package": "c", "expected": "1", "found": None},
        {"package": "d", "expected": None, "found": "1"},
    ]
    assert drift({"a": "1"}, {"a": "1"}) == []


def test_installed_packages(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.11/site-packages"
    for name in ["Flash_Infer.python-0.6.4.dist-info", "torch-2.9.1+cu130.dist-info", "torch", "x.egg-info"]:
        (site / name).mkdir(parents=True)
    assert installed_packages(tmp_path) == {"flash-infer-python": "0.6.4", "torch": "2.9.1+cu130"}
    assert installed_packages(tmp_path / "none") == {}


@pytest.mark.parametrize("text", [None, "", "{", "[]", '"x"', b"\xff"])
def test_a_manifest_that_is_none(tmp_path: Path, text: str | bytes | None) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read_manifest(tmp_path) is None


def test_states_without_a_build(tmp_path: Path) -> None:
    builder = ReleaseBuilder(tmp_path, SPEC)
    assert builder.state() == ("absent", [])
    assert not list(tmp_path.iterdir()), "looking must write nothing"
    builder.path.mkdir(parents=True)
    assert builder.state() == ("incomplete", [])
    (builder.path / MANIFEST).write_text('{"packages": {"tiny": "1.0"}}')
    assert builder.state() == ("drifted", [{"package": "tiny", "expected": "1.0", "found": None}])


# -- wheels and a source of them ---------------------------------------------------------------------------------------


def make_wheel(
    folder: Path, name: str, version: str, requires: tuple[str, ...] = (), files: Mapping[str, str] | None = None
) -> None:
    info = f"{name}-{version}.dist-info"
    content = dict(files if files is not None else {f"{name}.py": f"VERSION = {version!r}\n"})
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {line}\n" for line in requires
    )
    content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in content.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o100755 if "/scripts/" in path else 0o100644) << 16
            archive.writestr(entry, text)


def make_uv(folder: Path) -> None:
    if not UV.exists():
        pytest.skip(f"no uv beside {sys.executable}")
    make_wheel(folder, "uv", "9.0", files={"uv-9.0.data/scripts/uv": f'#!/bin/sh\nexec {UV} "$@"\n'})


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "tiny", "1.0", ("dep",))
    make_wheel(folder, "tiny", "2.0", ("dep",))
    make_wheel(folder, "strict", "1.0", ("dep==1.0",))
    make_wheel(folder, "dep", "1.0")
    make_wheel(folder, "dep", "2.0")
    make_wheel(folder, "extra", "1.0")
    make_wheel(folder, "broken", "1.0", files={"broken.py": "raise OSError('libcudart.so.13: cannot open')\n"})
    make_wheel(
        folder,
        "torch",
        "2.9.1+cu130",
        files={"torch/__init__.py": "from . import version\n", "torch/version.py": "cuda = '13.0'\n"},
    )
    make_wheel(
        folder,
        "torch",
        "2.9.1",
        files={"torch/__init__.py": "from . import version\n", "torch/version.py": "cuda = None\n"},
    )
    return folder


@pytest.fixture(scope="module")
def uv_wheels(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uv-wheels")
    shutil.copytree(wheels, folder, dirs_exist_ok=True)
    make_uv(folder)
    return folder


def offline(folder: Path, *requirements: str, **changes: Any) -> dict[str, Any]:
    return {
        "python": PYTHON,
        "steps": [{"name": "engine", "requirements": list(requirements or ["tiny==1.0"]), **changes}],
        "find_links": [str(folder)],
        "offline": True,
    }


@pytest.fixture(autouse=True, scope="module")
def compiler() -> Iterator[Callable[[ReleaseBuilder], None]]:
    """The machine that runs the tests needs none; the real check."""
    real = ReleaseBuilder._check_compiler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReleaseBuilder, "_check_compiler", lambda self: None)
        yield real


@pytest.fixture(autouse=True, scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Settings of whoever runs the play, which must not decide what is in a release."""
    folder = tmp_path_factory.mktemp("surroundings")
    make_wheel(folder, "dep", "9.0")
    (folder / "ghost.py").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in {
            "PYTHONPATH": str(folder),
            "PIP_FIND_LINKS": str(folder),
            "PIP_TARGET": str(folder / "target"),
            "UV_FIND_LINKS": str(folder),
            "UV_TARGET": str(folder / "target"),
            "PIP_RETRIES": "0",
            "UV_HTTP_RETRIES": "0",
            "PIP_CACHE_DIR": str(folder / "pip-cache"),
            "UV_CACHE_DIR": str(folder / "uv-cache"),
            "NO_PROXY": "127.0.0.1",
        }.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([PYTHON, "-m", "venv", folder], check=True, env={"PATH": os.environ["PATH"]}, cwd="/")
    return folder


@pytest.fixture
def quick(empty_venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one virtual environment instead of new ones, where how it is made is not the matter."""
    monkeypatch.setattr(
        ReleaseBuilder, "_make_venv", lambda self: shutil.copytree(empty_venv, self.venv, symlinks=True)
    )


@pytest.fixture(scope="module")
def built(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Root, description and manifest of a release that pip built, since there is no uv in the source."""
    root = tmp_path_factory.mktemp("built")
    steps = [
        {"name": "torch", "requirements": ["torch==2.9.1+cu130"]},
        {"name": "engine", "requirements": ["tiny==1.0  # the engine", "#", ""]},
    ]
    wanted = {**offline(wheels), "steps": steps}
    manifest = ReleaseBuilder(root, wanted, imports=["tiny", "dep"], torch_cuda="13.0").ensure()
    return root, wanted, manifest


@pytest.fixture(scope="module")
def built_by_uv(
    uv_wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    root = tmp_path_factory.mktemp("built")
    wanted = offline(uv_wheels, "tiny==1.0", "strict==1.0", overrides=["dep==2.0  # against strict"])
    return root, wanted, ReleaseBuilder(root, wanted, imports=["tiny", "strict"]).ensure()


@pytest.fixture(params=["pip", "uv"])
def release(request: pytest.FixtureRequest, tmp_path: Path) -> ReleaseBuilder:
    """A copy of a finished release, one for each installer."""
    root, wanted, _manifest = request.getfixturevalue("built" if request.param == "pip" else "built_by_uv")
    shutil.copytree(root, tmp_path / "root", symlinks=True)
    return ReleaseBuilder(tmp_path / "root", wanted, imports=["tiny"])


def by_hand(builder: ReleaseBuilder, *arguments: str) -> None:
    source = ["--no-index", *(f"--find-links={folder}" for folder in builder.canonical["find_links"])]
    subprocess.run(
        [builder.python, "-m", "pip", "--quiet", *arguments, *(source if arguments[0] == "install" else [])],
        check=True,
        env={"PATH": os.environ["PATH"]},
        cwd="/",
    )


# -- builds ------------------------------------------------------------------------------------------------------------


def test_a_build_with_pip(built: tuple[Path, dict[str, Any], dict[str, Any]]) -> None:
    root, wanted, manifest = built
    builder = ReleaseBuilder(root, wanted)
    assert builder.path == root / "releases" / release_id(wanted)
    packages = manifest["packages"]
    assert {name: packages[name] for name in ("tiny", "dep", "torch")} == {
        "tiny": "1.0",
        "dep": "2.0",
        "torch": "2.9.1+cu130",
    }
    assert "uv" not in packages and manifest["installer"] == "pip"
    assert manifest["torch_cuda"] == "13.0"
    assert manifest["python_version"] == ".".join(map(str, sys.version_info[:3]))
    assert manifest["spec"] == canonical_spec(wanted) and manifest["id"] == builder.id
    assert read_manifest(builder.path) == manifest
    assert builder.state() == ("present", [])
    assert (builder.path / "requirements-engine.txt").read_text() == "tiny==1.0\n"
    assert not (builder.path / (MANIFEST + ".new")).exists()


def test_a_build_with_uv(built_by_uv: tuple[Path, dict[str, Any], dict[str, Any]]) -> None:
    root, wanted, manifest = built_by_uv
    builder = ReleaseBuilder(root, wanted)
    assert manifest["installer"] == "uv"
    packages = {name: manifest["packages"][name] for name in ("tiny", "strict", "dep", "uv")}
    assert packages == {"tiny": "1.0", "strict": "1.0", "dep": "2.0", "uv": "9.0"}
    assert (builder.path / "overrides-engine.txt").read_text() == "dep==2.0\n"
    assert list(builder.venv.glob("lib/python3*/site-packages/__pycache__/tiny.*.pyc")), "not compiled"
    assert builder.state() == ("present", [])
    assert manifest["torch_cuda"] is None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_a_step_without_dependencies(uv_wheels: Path, tmp_path: Path, installer: str) -> None:
    wanted = offline(uv_wheels, "tiny==1.0", no_deps=True)
    packages = ReleaseBuilder(tmp_path, wanted, installer=installer).ensure()["packages"]
    assert packages["tiny"] == "1.0" and "dep" not in packages
    assert ("uv" in packages) == (installer == "uv")


@pytest.mark.usefixtures("quick")
def test_an_interrupted_build_is_built_anew(wheels: Path, tmp_path: Path) -> None:
    builder = ReleaseBuilder(tmp_path, offline(wheels), imports=["tiny"])
    rest = builder.venv / "lib" / "python3.11" / "site-packages" / "half-1.0.dist-info"
    rest.mkdir(parents=True)
    neighbour = builder.releases / "0123456789ab" / "file"
    neighbour.parent.mkdir()
    neighbour.write_text("serves")
    assert builder.state() == ("incomplete", [])
    manifest = builder.ensure()
    assert not rest.exists() and "half" not in manifest["packages"]
    assert neighbour.read_text() == "serves"
    assert builder.state() == ("present", [])


@pytest.mark.usefixtures("quick")
def test_a_module_that_does_not_import(wheels: Path, tmp_path: Path) -> None:
    wanted = offline(wheels, "tiny==1.0", "broken==1.0")
    builder = ReleaseBuilder(tmp_path, wanted, imports=["tiny", "broken", "ghost"])
    with pytest.raises(ReleaseError) as caught:
        builder.ensure()
    message = str(caught.value)
    assert "2 of 3 modules do not import" in message
    assert "broken: OSError: libcudart.so.13: cannot open" in message
    # It lies in the folder of the play and in its PYTHONPATH, which is not the service's.
    assert "ghost: ModuleNotFoundError" in message
    assert "tiny:" not in message
    assert builder.state() == ("incomplete", [])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("torch", "asked", "message"),
    [
        ("torch==2.9.1+cu130", "12.9", "was built for CUDA 13.0, expected 12.9 (sglang_torch_cuda)"),
        ("torch==2.9.1+cu130", "", "was built for CUDA 13.0, expected none (sglang_torch_cuda)"),
        ("torch===2.9.1", "13.0", "was built for CUDA none, expected 13.0 (sglang_torch_cuda)"),
        ("dep==1.0", "", "torch: ModuleNotFoundError"),
    ],
)
def test_a_wrong_torch(wheels: Path, tmp_path: Path, torch: str, asked: str, message: str) -> None:
    """Also when no module of the list imports torch."""
    builder = ReleaseBuilder(tmp_path, offline(wheels, torch), torch_cuda=asked)
    with pytest.raises(ReleaseError) as caught:
        builder.ensure()
    assert message in str(caught.value)
    assert read_manifest(builder.path) is None


@pytest.mark.usefixtures("quick")
def test_a_right_torch_without_cuda(wheels: Path, tmp_path: Path) -> None:
    builder = ReleaseBuilder(tmp_path, offline(wheels, "torch===2.9.1"), torch_cuda="")
    assert builder.ensure()["torch_cuda"] is None


def test_the_check_has_its_environment(release: ReleaseBuilder) -> None:
    site = next(release.venv.glob("lib/python3*/site-packages"))
    (site / "asks.py").write_text("import os\nprint('no newline', end='')\nos.environ['ENGINE_HOME']\n")
    ask = {"imports": ["asks"]}
    root = release.releases.parent
    with pytest.raises(ReleaseError, match=r"asks: KeyError: 'ENGINE_HOME'"):
        ReleaseBuilder(root, release.spec, **ask).check()
    assert ReleaseBuilder(root, release.spec, **ask, environment={"ENGINE_HOME": "/x"}).check()["torch_cuda"] is None


def test_a_check_that_says_nothing(release: ReleaseBuilder) -> None:
    site = next(release.venv.glob("lib/python3*/site-packages"))
    (site / "leaves.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(ReleaseError, match="printed no result"):
        ReleaseBuilder(release.releases.parent, release.spec, imports=["leaves"]).check()


@pytest.mark.usefixtures("quick")
def test_the_services_user_can_read_what_root_builds_under_a_strict_umask(wheels: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    before = os.umask(0o077)
    try:
        builder = ReleaseBuilder(root, offline(wheels), imports=["tiny"])
        builder.ensure()
        assert os.umask(0o077) == 0o077, "the umask of whoever builds is put back"
    finally:
        os.umask(before)
    (module,) = builder.venv.glob("lib/python3*/site-packages/tiny.py")
    for path in (root, builder.releases, builder.path, builder.venv, builder.python.parent, *module.parents[:3]):
        assert path.stat().st_mode & 0o055 == 0o055, path
    assert module.stat().st_mode & 0o044 == 0o044


def test_a_release_that_only_root_can_enter_is_opened(release: ReleaseBuilder) -> None:
    (module,) = release.venv.glob("lib/python3*/site-packages/tiny.py")
    for path, mode in ((release.venv, 0o700), (module.parent, 0o750), (module, 0o600)):
        path.chmod(mode)
    state, found = release.state()
    assert state == "drifted"
    assert found == [{"package": str(release.venv), "found": "mode 0700", "expected": "mode 0755"}]
    assert explain_drift(found) == f"{release.venv}: mode 0700, expected mode 0755"
    release.ensure()
    assert release.state() == ("present", [])
    assert (release.venv.stat().st_mode & 0o777, module.stat().st_mode & 0o777) == (0o755, 0o644)


@pytest.mark.usefixtures("quick")
def test_a_library_of_the_distribution_is_named_as_one(wheels: Path, tmp_path: Path) -> None:
    make_wheel(
        tmp_path, "linked", "1.0",
        files={"linked.py": "raise ImportError('libnuma.so.1: cannot open shared object file: No such file or directory')\n"},
    )  # fmt: skip
    wanted = {**offline(wheels, "linked==1.0"), "find_links": [str(wheels), str(tmp_path)]}
    with pytest.raises(
        ReleaseError, match=r"libnuma\.so\.1 comes from the distribution: add its package to sglang_system"
    ):
        ReleaseBuilder(tmp_path / "root", wanted, imports=["linked"]).ensure()


def test_a_cuda_engine_needs_a_compiler_and_the_headers_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Callable[[ReleaseBuilder], None]
) -> None:
    include, commands = tmp_path / "include", tmp_path / "bin"
    include.mkdir()
    commands.mkdir()
    monkeypatch.setattr(ReleaseBuilder, "_check_compiler", compiler)
    monkeypatch.setattr(ReleaseBuilder, "_run", lambda *_args: f"{include / 'Python.h'}\n")
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.delenv("CC", raising=False)
    wanted = {"python": sys.executable, "steps": [{"name": "engine", "requirements": ["tiny==1.0"]}], "offline": True}
    builder = ReleaseBuilder(tmp_path / "root", {**wanted, "find_links": [str(tmp_path)]}, torch_cuda="13.0")
    for made, words in (
        (None, ("Python.h (the package python", "-dev)", "no C compiler in PATH (the package build-essential)")),
        (include / "Python.h", ("found no C compiler",)),
    ):
        if made:
            made.write_text("")
        with pytest.raises(ReleaseError) as caught:
            builder.ensure()
        for word in words:
            assert word in str(caught.value), caught.value
        assert not builder.releases.exists()
    (commands / "gcc").write_text("#!/bin/sh\n")
    (commands / "gcc").chmod(0o755)
    builder._check_sources()
    # Nothing is compiled with Triton on a CPU.
    (commands / "gcc").unlink()
    ReleaseBuilder(tmp_path / "root", {**wanted, "find_links": [str(tmp_path)]}, torch_cuda="")._check_sources()


# -- refused before anything is changed --------------------------------------------------------------------------------


def test_too_little_space(wheels: Path, tmp_path: Path) -> None:
    builder = ReleaseBuilder(tmp_path, offline(wheels), min_free_bytes=10**18)
    with pytest.raises(ReleaseError, match=r"GB free, expected at least 1000000000\.0 GB .*sglang_min_free_gb"):
        builder.ensure()
    assert not builder.path.exists()


def test_a_missing_folder_of_wheels(wheels: Path, tmp_path: Path) -> None:
    wanted = offline(wheels)
    wanted["find_links"].append("/nowhere/wheels")
    builder = ReleaseBuilder(tmp_path / "root", wanted)
    with pytest.raises(ReleaseError, match=r"sglang_find_links names /nowhere/wheels, which is no folder"):
        builder.ensure()
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("python", ["/nowhere/python3", __file__, "/usr/bin"])
def test_a_missing_base_interpreter(wheels: Path, tmp_path: Path, python: str) -> None:
    builder = ReleaseBuilder(tmp_path / "root", {**offline(wheels), "python": python})
    with pytest.raises(ReleaseError, match=f"sglang_base_python is {python}, which is not an executable"):
        builder.ensure()
    assert not (tmp_path / "root").exists()


def test_an_interpreter_that_cannot_be_run(wheels: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/nowhere/interpreter\n")
    python.chmod(0o755)
    builder = ReleaseBuilder(tmp_path, {**offline(wheels), "python": str(python)})
    with pytest.raises(ReleaseError, match="could not make the virtual environment"):
        builder.ensure()


def test_a_second_play_is_refused(wheels: Path, tmp_path: Path) -> None:
    builder = ReleaseBuilder(tmp_path, offline(wheels))
    builder.releases.mkdir()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, builder.releases / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin and other.stdout
        other.stdout.readline()
        with pytest.raises(ReleaseError, match="another play builds a release below"):
            builder.ensure()
        assert not builder.path.exists()
        other.stdin.write(b"\n")
        other.stdin.close()
    with builder.lock():
        pass


def test_the_lock_is_held_during_a_build_and_not_after(release: ReleaseBuilder) -> None:
    def free() -> bool:
        with (release.releases / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return False
            return True

    held = []
    release._check_disk = lambda: held.append(not free())  # type: ignore[method-assign]
    release.ensure()
    assert held == [True] and free()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("installer", "why"), [("pip", "sglang_installer is pip"), ("auto", "uv could not be installed")]
)
def test_pip_cannot_override(wheels: Path, tmp_path: Path, installer: str, why: str) -> None:
    first = {"name": "first", "requirements": ["tiny==1.0"]}
    wanted = offline(wheels, "strict==1.0", overrides=["dep==2.0"])
    wanted["steps"].insert(0, first)
    builder = ReleaseBuilder(tmp_path, wanted, installer=installer)
    with pytest.raises(ReleaseError) as caught:
        builder.ensure()
    assert f"step engine overrides dep==2.0, which pip cannot do, and {why}; expected uv" in str(caught.value)
    assert "tiny" not in installed_packages(builder.venv), "known before the first step"


@pytest.mark.usefixtures("quick")
def test_uv_that_is_asked_for_and_not_there(wheels: Path, tmp_path: Path) -> None:
    builder = ReleaseBuilder(tmp_path, offline(wheels), installer="uv")
    with pytest.raises(ReleaseError, match="could not install uv of release"):
        builder.ensure()
    assert builder.state() == ("incomplete", [])


# -- repair ------------------------------------------------------------------------------------------------------------


def test_what_was_changed_by_hand_is_put_back(release: ReleaseBuilder) -> None:
    """A pin, a dependency that nothing pins, and a package that nobody asked for."""
    before = read_manifest(release.path)
    assert before
    by_hand(release, "install", "--no-deps", "tiny==2.0", "dep==1.0", "extra==1.0")
    state, found = release.state()
    assert state == "drifted"
    assert found == [
        {"package": "dep", "expected": "2.0", "found": "1.0"},
        {"package": "extra", "expected": None, "found": "1.0"},
        {"package": "tiny", "expected": "1.0", "found": "2.0"},
    ]
    kept = []
    run = release._run

    def watched(*arguments: Any, **options: Any) -> str:
        kept.append(read_manifest(release.path) == before)
        return run(*arguments, **options)

    release._run = watched  # type: ignore[method-assign]
    manifest = release.ensure()
    assert len(kept) >= 3 and all(kept), "the manifest must stay until the repair is done"
    assert manifest["packages"] == before["packages"] == installed_packages(release.venv)
    assert manifest["installer"] == before["installer"]
    assert release.state() == ("present", [])


def test_what_was_removed_by_hand_is_put_back(release: ReleaseBuilder) -> None:
    before = read_manifest(release.path)
    assert before
    by_hand(release, "uninstall", "--yes", "tiny", "dep")
    assert release.state()[0] == "drifted"
    assert release.ensure()["packages"] == before["packages"]


def test_a_repair_is_done_by_what_built_the_release(
    built: tuple[Path, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    """Another installer, which may be another package in it, would be a drift of its own."""
    root, wanted, manifest = built
    shutil.copytree(root, tmp_path / "root", symlinks=True)
    builder = ReleaseBuilder(tmp_path / "root", wanted, installer="uv")
    by_hand(builder, "install", "--no-deps", "tiny==2.0")
    found = builder.ensure()
    assert found["installer"] == "pip" and found["packages"] == manifest["packages"]


def test_a_failed_repair_keeps_the_manifest(release: ReleaseBuilder) -> None:
    before = (release.path / MANIFEST).read_bytes()
    by_hand(release, "install", "--no-deps", "tiny==2.0")
    failing = ReleaseBuilder(release.releases.parent, release.spec, imports=["ghost"])
    with pytest.raises(ReleaseError, match="ghost"):
        failing.ensure()
    assert (release.path / MANIFEST).read_bytes() == before


def test_what_the_sources_no_longer_hold(release: ReleaseBuilder) -> None:
    manifest = read_manifest(release.path)
    assert manifest
    manifest["packages"]["dep"] = "7.0"
    text = json.dumps(manifest)
    (release.path / MANIFEST).write_text(text)
    with pytest.raises(ReleaseError, match=r"dep==7\.0") as caught:
        release.ensure()
    assert "The release keeps its manifest; the next run repairs it again" in str(caught.value)
    assert (release.path / MANIFEST).read_text() == text


def test_drift_that_a_repair_does_not_end_is_no_success(
    release: ReleaseBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (release.path / MANIFEST).read_bytes()
    by_hand(release, "install", "--no-deps", "dep==1.0")
    monkeypatch.setattr(release, "_install", lambda tool, step: None)
    with pytest.raises(ReleaseError, match=r"still holds other packages than its manifest .*: dep 1\.0 \(2\.0\)"):
        release.ensure()
    assert (release.path / MANIFEST).read_bytes() == before


def test_pip_is_put_back_without_a_source(release: ReleaseBuilder) -> None:
    before = read_manifest(release.path)
    assert before
    by_hand(release, "uninstall", "--yes", "pip")
    assert release.state()[0] == "drifted"
    assert release.ensure()["packages"] == before["packages"]
    by_hand(release, "--version")


def test_a_lost_interpreter_is_put_back(release: ReleaseBuilder) -> None:
    for link in (release.venv / "bin").glob("python*"):
        link.unlink()
    assert release.state() == ("drifted", [])
    release.ensure()
    assert release.state() == ("present", [])
    subprocess.run([release.python, "-c", "import tiny"], check=True, env={}, cwd="/")


# -- passwords ---------------------------------------------------------------------------------------------------------


class Source(http.server.ThreadingHTTPServer):
    """An index at /simple/, one with nothing but uv at /bootstrap/, a page of links at /page/, behind a password."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused = 0
        super().__init__(("127.0.0.1", 0), Handler)

    def address(self, kind: str, password: str = SECRET) -> str:
        return f"http://user:{password}@127.0.0.1:{self.server_address[1]}/{kind}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Source

    def do_GET(self) -> None:
        expected = "Basic " + base64.b64encode(f"user:{SECRET}".encode()).decode()
        parts = self.path.strip("/").split("/")
        if self.headers.get("Authorization") != expected:
            self.server.refused += 1
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            body = b""
        elif self.path.endswith(".whl"):
            self.send_response(200)
            body = (self.server.folder / parts[-1]).read_bytes()
        else:
            names = sorted(file.name for file in self.server.folder.iterdir())
            shown = [name for name in names if parts[0] == "page" or name.startswith(parts[-1] + "-")]
            if parts[0] == "bootstrap":
                shown = [name for name in shown if name.startswith("uv-")]
            self.send_response(200 if shown else 404)
            self.send_header("Content-Type", "text/html")
            links = "".join(f'<a href="/files/{name.replace("+", "%2B")}">{name}</a>\n' for name in shown)
            body = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def source(uv_wheels: Path) -> Iterator[Source]:
    with Source(uv_wheels) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every command line that is run, as others on the host can read it."""
    seen: list[str] = []
    run = subprocess.run

    def recorded(command: Any, **options: Any) -> Any:
        seen.append(" ".join(map(str, command)))
        return run(command, check=options.pop("check"), **options)

    monkeypatch.setattr(release_module.subprocess, "run", recorded)
    return seen


def in_files(root: Path, word: str) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("installer", ["pip", "uv"])
@pytest.mark.parametrize("place", ["index_url", "extra_index_urls", "find_links", "step.index_url"])
def test_passwords_work_and_stay_in_memory(
    source: Source, commands: list[str], tmp_path: Path, installer: str, place: str
) -> None:
    address = source.address("page" if place == "find_links" else "simple")
    wanted: dict[str, Any] = {"python": PYTHON, "steps": [{"name": "engine", "requirements": ["tiny==1.0"]}]}
    if place == "step.index_url":
        wanted["steps"][0]["index_url"] = address
        wanted["index_url"] = source.address("bootstrap")
    elif place == "index_url":
        wanted[place] = address
    elif place == "extra_index_urls":
        wanted.update({"index_url": source.address("nothing"), place: [address]})
    else:
        wanted.update({place: [address], "offline": True})
    manifest = ReleaseBuilder(tmp_path, wanted, installer=installer, imports=["tiny"]).ensure()
    assert manifest["packages"]["dep"] == "2.0" and manifest["installer"] == installer
    assert len(commands) >= 2
    assert not [line for line in commands if SECRET in line or "user:" in line]
    assert not in_files(tmp_path, SECRET)
    assert SECRET not in json.dumps(manifest)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_a_password_does_not_reach_an_error(source: Source, uv_wheels: Path, tmp_path: Path, installer: str) -> None:
    # uv itself comes from the folder, so that it is the one that fails.
    wanted = {**offline(uv_wheels), "offline": False, "index_url": source.address("simple", "wr0ng")}
    wanted["steps"][0]["requirements"] = ["absent==1.0"]
    builder = ReleaseBuilder(tmp_path, wanted, installer=installer)
    with pytest.raises(ReleaseError) as caught:
        builder.ensure()
    assert source.refused and "could not install the step 'engine'" in str(caught.value)
    assert "wr0ng" not in str(caught.value)
    assert not in_files(tmp_path, "wr0ng")


@pytest.mark.parametrize(
    "said",
    [
        f"cannot reach https://user:{SECRET}@host/simple",
        f"cannot reach https://user:x@{SECRET}@host/simple",
        f"git+ssh://{SECRET}@host/x and http://a:{SECRET}@host/simple",
        # The cut falls into the address.
        f"https://user:{SECRET}@host/" + "x" * 2485,
        f"https://user:{SECRET}@host/" + "x" * 2490,
    ],
)
def test_what_a_tool_says_is_shown_without_passwords(wheels: Path, tmp_path: Path, said: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s\\377' '{said}' >&2\nexit 3\n")
    python.chmod(0o755)
    builder = ReleaseBuilder(tmp_path, {**offline(wheels), "python": str(python)})
    with pytest.raises(ReleaseError) as caught:
        builder.ensure()
    assert "(status 3). The release that serves is untouched; the next run starts over." in str(caught.value)
    assert SECRET not in str(caught.value)
    assert said[-10:] in str(caught.value)
