"""Tables and figures are made from result files."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from benchmarks.figures.__main__ import KINDS, README, load, main, render, update
from benchmarks.figures.charts import charts
from benchmarks.figures.results import ResultFileError
from benchmarks.figures.tables import PAGES
from tests.benchmarks.figures.made_up import results, write_checkout

pytestmark = pytest.mark.release


@pytest.fixture
def checkout(tmp_path):
    """A checkout with pages and a few results, before anything is drawn."""
    return write_checkout(tmp_path, ("offline", "online"))


def _result(checkout, kind: str):
    return checkout / "benchmarks" / "results" / f"{kind}_made_up.json"


def test_every_kind_is_written(tmp_path):
    """Pages and figures of every kind are written; a second run changes nothing; links resolve."""
    checkout = write_checkout(tmp_path, KINDS)
    written = {path.relative_to(checkout).as_posix() for path in update(checkout, write=True)}
    results_of = load(checkout / "benchmarks" / "results")
    figures = {f"docs/figures/{name}.svg" for each in results_of for name in charts(each)}
    assert written == {README, *PAGES, *figures}
    assert update(checkout, write=False) == []

    shown = set()
    for page in (README, *PAGES):
        path = checkout / page
        text = path.read_text()
        targets = {(path.parent / each).resolve() for each in re.findall(r"\]\((.*?)\)", text)}
        assert all(target.is_file() for target in targets), targets
        shown |= {target.relative_to(checkout.resolve()).as_posix() for target in targets}
        assert text.startswith("# Before\n") and text.endswith("\nAfter\n")
        assert "replaced" not in text
    assert figures <= shown

    svg = {figure: (checkout / figure).read_text() for figure in figures}
    for words in ("a peer", "jaxserve", ">321<", "roofline: 400"):
        assert words in svg["docs/figures/offline_made_up_peers.svg"]
    assert all(len(text) < 120_000 for text in svg.values())  # of the largest real result


def test_results_of_unknown_commits_are_refused(tmp_path, capsys):
    """A result names a commit of the history, as it is; without a history that is not checked."""
    checkout = write_checkout(tmp_path, ("offline",))
    assert main(["--root", str(checkout)]) == 0
    assert "no whole history" in capsys.readouterr().err

    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "-m", "First"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    path = _result(checkout, "offline")
    for named, code in ((commit.stdout.strip()[:12], 0), ("0" * 12, 2), ("HEAD-dirty", 2)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"commit": named}))
        assert main(["--root", str(checkout)]) == code
        assert code == 0 or f"commit '{named}' is not in the history" in capsys.readouterr().err


def test_every_kind_has_a_page():
    """Every kind of result is on one page besides the README."""
    shown = [kind for kinds in PAGES.values() for kind in kinds]
    assert sorted(shown) == sorted(KINDS)


def test_readme_has_one_table_and_one_picture(tmp_path):
    """The README has the comparison with other engines, and where jaxserve lost."""
    checkout = write_checkout(tmp_path, KINDS)
    text = render(README, load(checkout / "benchmarks" / "results"), checkout)
    assert len(re.findall(r"^\| --- ", text, re.MULTILINE)) == 1 and text.count("![") == 1
    link = "(benchmarks/results/offline_made_up.json)"
    assert f"| a peer | [160]{link} (150 to 165) | 2.00 | 3.0 s |" in text
    assert f"| lost | [failed]{link} | no wheel for it | |" in text
    assert "medians of 3 whole runs (least to most)" in text
    assert "jaxserve is behind fast: 0.50 times its speed." in text
    assert text.endswith("Nothing was measured on a GPU yet.")


def test_tables_show_medians_and_ranges(tmp_path):
    """Three runs have speeds 1, 1/2 and 5/4: the first is the median, the others the range."""
    checkout = write_checkout(tmp_path, tuple(results()))
    found = load(checkout / "benchmarks" / "results")
    text = render("docs/results/policies.md", found, checkout)
    link = "(../../benchmarks/results/policies_made_up.json)"
    row = f"| flover | [99]{link} (50 to 124) | 0.8 s (0.6 to 1.6) | 1.1 s (0.8 to 2.1) |"
    assert row in text
    assert "medians of 3 whole runs (least to most)" in text
    text = render("docs/results/throughput.md", found, checkout)
    link = "(../../benchmarks/results/offline_made_up.json)"
    assert f"| one run | [132]{link} | 75% of roofline | 1.0% |" in text
    rows = [row for row in text.splitlines() if re.match(r"\| (?!engine).*\d", row)]
    assert len(rows) == 1 + 3
    for row in rows:
        (target,) = set(re.findall(r"\]\(../../(benchmarks/results/.*?)\)", row))
        assert (checkout / target).is_file()


def test_tables_say_what_was_lost(tmp_path):
    """Tables with `auto` say in which figure it lost, and which baseline is missing."""
    checkout = write_checkout(tmp_path, KINDS)
    found = load(checkout / "benchmarks" / "results")
    text = render("docs/results/policies.md", found, checkout)
    sentences = [line for line in text.splitlines() if "not measured here" in line]
    assert sentences == [
        "Nothing lost in output tokens/s: auto is not behind vllm like. "
        "s3 oracle was not measured here.",
        "Nothing lost in p90 s/token: auto is not behind vllm like. "
        "s3 oracle was not measured here.",
        "Lost in output tokens/s, a model: auto is 38% behind s3 oracle. "
        "vllm like was not measured here.",
    ]


def test_results_without_runs_are_refused(checkout):
    """A file without its runs, or without their number, is refused with a remedy."""
    data = results()["policies"]
    for figures in data["policies"].values():
        del figures["runs"]
    path = _result(checkout, "policies")
    path.write_text(json.dumps(data))
    with pytest.raises(ResultFileError, match="policies.concurrent_instances has no runs.*again"):
        update(checkout, write=False)
    path.write_text(json.dumps({**data, "repeats": 1}))
    assert path not in update(checkout, write=False)
    del data["repeats"]
    path.write_text(json.dumps(data))
    with pytest.raises(ResultFileError, match="has 'repeats', and this one does not"):
        update(checkout, write=False)


def test_names_of_bounds_and_missing_peers(tmp_path):
    """A result with a roofline says so; one without peers has neither their table nor a figure."""
    checkout = write_checkout(tmp_path, ("offline",))
    data = results()["offline"] | {"compare": None}
    data["bound"]["run_s"] = 1.0
    data["device"] = {"platform": "gpu", "kind": "a GPU", "count": 1}
    _result(checkout, "offline").write_text(json.dumps(data))
    assert not any(path.suffix == ".svg" for path in update(checkout, write=True))
    assert "Nothing was measured" not in (checkout / "README.md").read_text()
    text = (checkout / "docs" / "results" / "throughput.md").read_text()
    assert "1 x a GPU" in text and "75% of roofline" in text
    assert "engine" not in text


def test_weights_in_few_bits_have_no_bound_of_dense_ones(tmp_path):
    """Such a result has columns for fewer requests, no bound, and no place in the README."""
    checkout = write_checkout(tmp_path, ("offline",))
    data = results()["offline"]
    engines = data["compare"]["engines"]
    data |= {"quantize": "int4", "compare": {**data["compare"], "fewer": {"4": engines}}}
    _result(checkout, "offline").write_text(json.dumps(data))
    update(checkout, write=True)
    assert "a peer" not in (checkout / "README.md").read_text()
    text = (checkout / "docs" / "results" / "throughput.md").read_text()
    assert "a-model, weights in int4, in float32" in text and "roofline" not in text
    assert "| 160 (150 to 165), 2.00 times |" in text
    assert "fast: 0.50 times its speed and fast at 4 of them: 0.50 times its speed" in text
    svg = (checkout / "docs" / "figures" / "offline_made_up_peers.svg").read_text()
    assert "roofline" not in svg


def test_same_results_give_the_same_bytes(checkout):
    """Writing again changes nothing."""
    update(checkout, write=True)
    assert update(checkout, write=True) == []


def test_check_detects_drift(checkout, capsys):
    """A changed number, an edited page, a missing figure and a surplus figure are each reported."""
    check = ["--check", "--root", str(checkout)]
    assert main(check) == 1
    assert main(check[1:]) == 0
    assert main(check) == 0
    capsys.readouterr()

    readme = checkout / "README.md"
    readme.write_text(readme.read_text().replace("[160]", "[161]"))
    assert main(check) == 1
    assert capsys.readouterr().out.splitlines() == ["README.md differs"]
    assert "[161]" in readme.read_text()
    update(checkout, write=True)

    (checkout / "docs" / "figures" / "online_made_up.svg").unlink()
    assert [path.name for path in update(checkout, write=False)] == ["online_made_up.svg"]
    update(checkout, write=True)

    changed = results()["offline"]
    changed["compare"]["engines"]["a_peer"]["runs"][0]["output_tokens_per_s"] = 156.0
    _result(checkout, "offline").write_text(json.dumps(changed))
    names = [path.name for path in update(checkout, write=False)]
    assert names == ["README.md", "throughput.md", "offline_made_up_peers.svg"]


def test_figures_without_a_result_go_and_other_pictures_stay(checkout):
    """A figure of a removed result is removed; another picture is not."""
    update(checkout, write=True)
    other = checkout / "docs" / "figures" / "drawing.svg"
    other.write_text("<svg/>")
    _result(checkout, "online").unlink()
    names = [path.name for path in update(checkout, write=True)]
    assert names == ["policies.md", "online_made_up.svg"]
    assert other.exists()
    assert not (checkout / "docs" / "figures" / "online_made_up.svg").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"benchmark": "novel"}', "\udcff"])
def test_broken_files_are_named(checkout, text, capsys):
    """A file that is not a result of a known kind raises an error that names the file."""
    path = _result(checkout, "stray")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ResultFileError, match="stray_made_up.json"):
        load(path.parent)
    assert main(["--root", str(checkout)]) == 2
    assert "stray_made_up.json" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_results_that_lack_a_field_are_named(tmp_path, kind):
    """A result without its figures raises an error that names the file and the field."""
    checkout = write_checkout(tmp_path, (kind,))
    _result(checkout, kind).write_text(json.dumps({"benchmark": kind}))
    with pytest.raises(ResultFileError, match=f"{kind}_made_up.json: a result of kind '{kind}'"):
        update(checkout, write=False)


def test_numbers_that_are_none_are_named(checkout):
    """A text instead of a number raises an error that names the file and the field."""
    changed = results()["offline"]
    changed["runs"][0]["output_tokens_per_s"] = "fast"
    _result(checkout, "offline").write_text(json.dumps(changed))
    with pytest.raises(ResultFileError, match="'runs.0.output_tokens_per_s' is 'fast'"):
        update(checkout, write=True)


def test_pages_need_their_markers(checkout, capsys):
    """A page without the markers is not changed, and is named."""
    (checkout / "README.md").write_text("# Nothing to replace\n")
    assert main(["--root", str(checkout)]) == 2
    assert "README.md needs one line" in capsys.readouterr().err
