"""``hotswap classify``, a site's own rules, the generated page and the benchmark's scores."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hotswap import cli
from hotswap.diagnosis import docs
from hotswap.diagnosis.user_rules import load_rules
from hotswap.errors import EXIT_USAGE, EXIT_USER_ERROR, UsageError

ROOT = Path(__file__).parents[2]
FAILURE = "node-7:1:2 [0] NCCL INFO x\n[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n[rank1]: Broken pipe\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "node-7" / "train.log"
    path.parent.mkdir()
    path.write_text(FAILURE, encoding="utf-8")
    return path


def test_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["classify", "--json", str(log)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "node_fault" and data["confident"] is True
    assert data["action"] == "replace_node"
    assert data["culprit"] == {"kind": "gpu", "node": "node-7", "rank": 3}
    assert data["rules"] == ["gpu.ecc-uncorrectable"]
    assert [one["text"] for one in data["deciding"]] == [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    ]
    assert [one["rank"] for one in data["echoes"]] == [1]


def test_text(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["classify", str(log.parent)]) == 0
    shown = capsys.readouterr().out
    assert "\033" not in shown
    for part in (
        "node_fault",
        "replace node",
        "rank 3",
        "gpu.ecc-uncorrectable",
        "decided by",
        "only echoes",
        "Broken pipe",
    ):
        assert part in shown
    assert cli.main(["classify", "--color", "always", str(log)]) == 0
    assert "\033[1;31mnode_fault" in capsys.readouterr().out


def test_control_characters_of_a_log_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"ValueError: \x1b[2Jgone\x07\n")
    assert cli.main(["classify", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_from_a_pipe() -> None:
    command = [sys.executable, "-m", "hotswap.cli", "classify", "--json"]
    done = subprocess.run(command, input=FAILURE, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["verdict"] == "node_fault"


def test_no_such_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["classify", str(tmp_path / "x")]) == EXIT_USAGE
    assert "no file or directory" in capsys.readouterr().err


def test_history_is_kept_between_runs(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text("[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered\n", encoding="utf-8")
    done = []
    for _ in range(3):
        assert cli.main(["classify", "--json", "--history", str(tmp_path / "nodes.json"), str(log)]) == 0
        done.append(json.loads(capsys.readouterr().out)["action"])
    assert done == ["respawn", "restart_with_health_check", "replace_node"]


def test_own_rules(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text(
        json.dumps([{"id": "site.pipe", "pattern": "Broken pipe", "verdict": "storage", "strength": "proof"}]),
        encoding="utf-8",
    )
    log.write_text("Broken pipe\n", encoding="utf-8")
    assert cli.main(["classify", "--json", "--rules", str(rules), str(log)]) == 0
    assert json.loads(capsys.readouterr().out)["rules"] == ["site.pipe"]


def test_the_linter_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["classify", "--lint-rules"]) == 0
    assert "no problems" in capsys.readouterr().out
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"id": "site.xid", "kind": "xid", "verdict": "storage"}]), encoding="utf-8")
    assert cli.main(["classify", "--lint-rules", "--rules", str(rules)]) == EXIT_USER_ERROR
    assert "xid.79: never applies, site.xid takes everything before it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot read rules"),
        ("{}", "must hold a list"),
        ("[1]", "no object with an id"),
        ('[{"id": "a", "pattern": "long enough"}]', "verdict"),
        ('[{"id": "a", "verdict": "storage"}]', "either a pattern or a kind"),
        ('[{"id": "a", "verdict": "nonsense", "pattern": "long enough"}]', "nonsense"),
        ('[{"id": "a", "verdict": "storage", "pattern": "("}]', "rule 'a'"),
        ('[{"id": "a", "verdict": "storage", "pattern": "[0-9]+"}]', "three letters"),
        ('[{"id": "a", "verdict": "storage", "kind": "xid", "where": 3}]', "must be an object"),
        ('[{"id": "a", "verdict": "storage", "pattern": "long enough", "colour": 1}]', "unknown fields: colour"),
        ('[{"id": "a", "verdict": "storage", "pattern": "long enough"}, {"id": "a", "verdict": "storage", "pattern": "long"}]', "two rules"),
    ],
)  # fmt: skip
def test_wrong_rules_are_said(content: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=complaint):
        load_rules(path)


def test_rules_over_facts_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text('[{"id": "a", "verdict": "storage", "kind": "xid", "where": {"code": [13, 31]}}]', encoding="utf-8")
    (rule,) = load_rules(path)
    assert rule.when.where == {"code": (13, 31)}  # type: ignore[union-attr]


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    assert page == docs.page(), "run python -m hotswap.diagnosis.docs"


def test_a_stale_page_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "failures.md"
    assert docs.main(["--check", str(path)]) == EXIT_USER_ERROR
    assert docs.main([str(path)]) == 0
    assert docs.main(["--check", str(path)]) == 0
    path.write_text(path.read_text(encoding="utf-8") + "x", encoding="utf-8")
    assert docs.main(["--check", str(path)]) == EXIT_USER_ERROR
    assert "stale" in capsys.readouterr().out


def test_classify_does_without_torch() -> None:
    program = "import sys, hotswap.diagnosis.cli, hotswap.diagnosis.probes.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_the_benchmark_scores_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_diagnosis", ROOT / "benchmarks" / "diagnosis.py")
    assert spec and spec.loader
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    good = {
        "id": "a",
        "verdict": "storage",
        "also_ok": [],
        "basis": "log",
        "log": "OSError: [Errno 116] Stale file handle",
    }
    guess = {"id": "b", "verdict": "unknown", "also_ok": [], "basis": "none", "log": "ValueError: x"}
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(good) + "\n", encoding="utf-8")
    assert benchmark.score(path) == 0
    path.write_text(json.dumps(good) + "\n" + json.dumps(guess) + "\n", encoding="utf-8")
    assert benchmark.score(path) == 1
    assert "confident on what nobody knows: 1 of 1" in capsys.readouterr().out
