"""docs/validation.md has the rows that scripts/validation.py computes; replays of TE-CCL's files end by hand."""

import json

import pytest

import teccl
import validation

pytestmark = pytest.mark.usefixtures("own_algorithms")
PAGE = validation.PAGE.read_text()


@pytest.mark.parametrize("case", [case for case in validation.cases() if case.is_quick], ids=lambda case: case.name)
def test_a_quick_row_of_the_page_is_what_is_computed(case):
    assert validation.row_of(case) in validation.standing(PAGE)[validation.PARTS[case.part].title]


def test_the_page_has_every_case_once_and_nothing_else():
    rows = validation.standing(PAGE)
    assert [*rows] == [part.title for part in validation.PARTS.values()]
    for name, part in validation.PARTS.items():
        names = [f"| {case.name}" for case in validation.cases() if case.part == name]
        assert not names or [row.split(" | ")[0] for row in rows[part.title]] == names
    assert "not yet computed" not in PAGE
    assert sum(int(row.split(" | ")[1]) for row in rows[validation.PARTS["teccl"].title]) == 154


def test_the_script_computes_the_rows_asked_for_and_keeps_the_others(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "validation.md"
    copy.write_text(PAGE.replace("| dgx1, bound | 171.429 (1200/7) | 171.429", "| dgx1, bound | 171.429 (1200/7) | 1"))
    monkeypatch.setattr(validation, "PAGE", copy)
    monkeypatch.setattr("sys.argv", ["validation", "-k", "dgx1, bound"])
    assert validation.main() == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert copy.read_text() == PAGE


# Three GPUs in a row, and a switch 9 between the first and the last. Links carry a chunk of 1 GB in a second.
LINE = teccl.Machine({(1, 2): teccl.Link(1.0, 0.0), (2, 1): teccl.Link(1.0, 0.0), (2, 3): teccl.Link(1.0, 0.5),
                      (3, 2): teccl.Link(1.0, 0.5), (1, 9): teccl.Link(1.0, 0.5), (9, 3): teccl.Link(1.0, 0.5),
                      (3, 9): teccl.Link(1.0, 0.5), (9, 1): teccl.Link(1.0, 0.5)}, frozenset((9,)), 3)
FLOWS = ["Chunk 0 from 1 traveled over 1->2 in epoch 0", "Chunk 0 from 1 traveled over 1->3 in epoch 0 via switches 9",
         "Chunk 0 from 2 traveled over 2->1 in epoch 0", "Chunk 0 from 2 traveled over 2->3 in epoch 0",
         "Chunk 0 from 3 traveled over 3->2 in epoch 0", "Chunk 0 from 3 traveled over 2->1 in epoch 2"]


def replay(flows, is_whole=True):
    content = {"1-Epoch_Duration": 1.0, "3-Epochs_Required": 3, "4-Collective_Finish_Time": 3.0,
               "5-Algo_Bandwidth": 1.0, "7-Flows": flows} | ({"6-Demand_Met": {}} if is_whole else {})
    return teccl.File(LINE, content).replay()


def test_flows_end_after_whole_epochs_and_earlier_without():
    """1 -> 9 -> 3: an epoch for the chunk, one for each latency; 3 -> 2 -> 1: a chunk and a latency, and a chunk."""
    assert replay(FLOWS) == teccl.Replay(3, 2.5, ())


@pytest.mark.parametrize(("old", "new", "said"), [
    ("2->1 in epoch 2", "2->1 in epoch 1", "2 sends data of (3, 0) in epoch 1 before they have come"),
    ("from 2 traveled over 2->1 in epoch 0", "from 2 traveled over 2->1 in epoch 2", "carries 2 chunks from epoch 2"),
    ("over 2->3", "over 2->1", "of the data of 2 do not come to 3")])
def test_flows_that_cannot_be_are_named(old, new, said):
    assert any(old in flow for flow in FLOWS)
    assert said in " ".join(replay([flow.replace(old, new) for flow in FLOWS]).faults)


def test_shares_of_a_chunk_are_summed():
    def flow(chunk, source, way, epoch):
        return f"Chunk {chunk} from {source} traveled over {way} with volume 0.5 in epoch {epoch}"

    flows = [flow(chunk, source, way, epoch) for chunk, source, way in
             ((1, 1, "1->2"), (0, 2, "2->1"), (2, 2, "2->3"), (1, 3, "3->2")) for epoch in (0, 1)]
    through = [f"{flow(chunk, source, way, epoch)} via switches 9" for chunk, source, way in
               ((2, 1, "1->3"), (0, 3, "3->1")) for epoch in (0, 1)]
    assert replay(flows + through, is_whole=False).epochs == 5
    assert replay(flows + through, is_whole=False).faults == ()
    assert "0.5 of the data of 3 do not come to 1" in " ".join(replay(flows + through[:-1], is_whole=False).faults)


def test_a_checkout_is_replayed_folder_by_folder(tmp_path):
    """Two GPUs of a DGX-2 x 2 file alone: the other chunks are missing, and the finish time is that of the flows."""
    folder = tmp_path / teccl.FOLDER / "DGX2_output" / "2_chassis" / "AllGather" / "Fast"
    folder.mkdir(parents=True)
    content = {"1-Epoch_Duration": 1e-6, "3-Epochs_Required": 2, "4-Collective_Finish_Time": 2e-6,
               "5-Algo_Bandwidth": 1000.0, "6-Demand_Met": {},
               "7-Flows": ["Chunk 0 from 1 traveled over 1->2 in epoch 0 via switches 0"]}
    (folder / "1MB.json").write_text(json.dumps(content))
    (row,) = validation.replays(tmp_path)
    assert row.startswith("| DGX2 x 2, AllGather, Fast | 1 | 0 | -1 | ")
    assert "1 files have twice the size in their names" in row
