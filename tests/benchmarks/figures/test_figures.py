"""Result files into README's tables and figures."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.common.environment import ROOT
from benchmarks.figures.__main__ import PAGES, main, render, update
from benchmarks.figures.results import KINDS, ResultFileError, load
from tests.benchmarks.made_up import results, write_checkout


@pytest.fixture
def checkout(tmp_path):
    """Pages and a few results, nothing drawn yet."""
    return write_checkout(tmp_path, ("offline", "online"))


def _result(checkout, kind: str):
    return checkout / "benchmarks" / "results" / f"{kind}_made_up.json"


def test_pages_of_this_checkout_say_what_the_results_say():
    """README.md, docs/results.md and docs/figures/ are as `python -m benchmarks.figures` writes."""
    assert update(ROOT, write=False) == []


def test_every_kind_is_written(tmp_path):
    """Pages and figures of every kind; then nothing is left to do, and no link is broken."""
    checkout = write_checkout(tmp_path, KINDS)
    written = {path.relative_to(checkout).as_posix() for path in update(checkout, write=True)}
    names = [f"{kind}_made_up" for kind in ("policies", "online", "simulate")]
    names += ["offline_made_up_peers"]
    names += [f"flover_made_up_{number}" for number in range(4, 8)]
    names += ["conversations_made_up_1", "conversations_made_up_2", "pensieve_made_up"]
    figures = {f"docs/figures/{name}.svg" for name in names}
    assert written == {"README.md", "docs/results.md", *figures}
    assert update(checkout, write=False) == []

    page = (checkout / "docs" / "results.md").read_text()
    targets = set(re.findall(r"\]\((.*?)\)", page))
    assert {f"../{figure}" for figure in figures} <= targets
    for target in targets:
        assert (checkout / "docs" / target).is_file(), target
    assert page.startswith("# Before\n") and page.endswith("\nAfter\n")
    assert "replaced" not in page

    svg = {figure: (checkout / figure).read_text() for figure in figures}
    assert "flover without shuffle" in svg["docs/figures/flover_made_up_6.svg"]
    for words in ("a peer", "jaxserve", ">321<", "matrix products alone: 400"):
        assert words in svg["docs/figures/offline_made_up_peers.svg"]
    assert all(len(text) < 60_000 for text in svg.values())


def test_rows_link_their_file_and_show_its_numbers(tmp_path):
    """Every row with a number links to an existing result; the headline figures are there."""
    checkout = write_checkout(tmp_path, KINDS)
    results_of = load(checkout / "benchmarks" / "results")
    text = "\n\n".join(render(page, results_of, checkout) for page in PAGES[:1])
    rows = [row for row in text.splitlines() if re.match(r"\| (?!policy).*\d", row)]
    assert len(rows) == 1 + 2 + 5
    for row in rows:
        (target,) = re.findall(r"\]\((benchmarks/results/.*?)\)", row)
        assert (checkout / target).is_file()
    assert (
        "[132](benchmarks/results/offline_made_up.json) | 75% of matrix products alone | 1.0%"
        in text
    )
    assert "| a peer | [160](benchmarks/results/offline_made_up.json) | 2.00 | 3.0 s |" in text
    assert (
        "| lost | [failed](benchmarks/results/offline_made_up.json) | no wheel for it | |" in text
    )
    assert "| flover | [99](benchmarks/results/policies_made_up.json) | 0.8 s | 1.1 s |" in text
    assert "Nothing was measured on a GPU yet." in text


def test_names_of_bounds_and_missing_peers(tmp_path):
    """A result with a roofline says so; one without peers has neither their table nor a figure."""
    checkout = write_checkout(tmp_path, ("offline",))
    data = results()["offline"] | {"compare": None}
    data["bound"]["run_s"] = 1.0
    data["device"] = {"platform": "gpu", "kind": "a GPU", "count": 1}
    _result(checkout, "offline").write_text(json.dumps(data))
    assert [path.name for path in update(checkout, write=True)] == ["README.md", "results.md"]
    text = (checkout / "README.md").read_text()
    assert "1 x a GPU" in text and "75% of roofline" in text
    assert "engines" not in text and "Nothing was measured on a GPU" not in text


def test_same_results_give_the_same_bytes(checkout):
    """Writing again changes nothing."""
    update(checkout, write=True)
    assert update(checkout, write=True) == []


def test_check_detects_drift(checkout, capsys):
    """A changed number, an edited page, a lost figure and one without a result are each told."""
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
    changed["compare"]["engines"]["a_peer"]["output_tokens_per_s"] = 99.0
    _result(checkout, "offline").write_text(json.dumps(changed))
    names = [path.name for path in update(checkout, write=False)]
    assert names == ["README.md", "results.md", "offline_made_up_peers.svg"]


def test_figures_without_a_result_go_and_other_pictures_stay(checkout):
    """What was drawn from a removed result is removed; a picture of someone else's is not."""
    update(checkout, write=True)
    other = checkout / "docs" / "figures" / "drawing.svg"
    other.write_text("<svg/>")
    _result(checkout, "online").unlink()
    names = [path.name for path in update(checkout, write=True)]
    assert names == ["results.md", "online_made_up.svg"]
    assert other.exists()
    assert not (checkout / "docs" / "figures" / "online_made_up.svg").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"benchmark": "novel"}', "\udcff"])
def test_broken_files_are_named(checkout, text, capsys):
    """A file that is no result of a known kind ends it with an error that names the file."""
    path = _result(checkout, "stray")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ResultFileError, match="stray_made_up.json"):
        load(path.parent)
    assert main(["--root", str(checkout)]) == 2
    assert "stray_made_up.json" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_results_that_lack_a_field_are_named(tmp_path, kind):
    """A result of which the figures are gone ends it with the file and the field."""
    checkout = write_checkout(tmp_path, (kind,))
    _result(checkout, kind).write_text(json.dumps({"benchmark": kind}))
    with pytest.raises(ResultFileError, match=f"{kind}_made_up.json: a result of kind '{kind}'"):
        update(checkout, write=False)


def test_numbers_that_are_none_are_named(checkout):
    """A text where a number should be is told with both."""
    changed = results()["offline"] | {"output_tokens_per_s": "fast"}
    _result(checkout, "offline").write_text(json.dumps(changed))
    with pytest.raises(ResultFileError, match="'output_tokens_per_s' is 'fast'"):
        update(checkout, write=True)


def test_pages_need_their_markers(checkout, capsys):
    """A page without the markers is left alone, and named."""
    (checkout / "README.md").write_text("# Nothing to replace\n")
    assert main(["--root", str(checkout)]) == 2
    assert "README.md needs one line" in capsys.readouterr().err
