"""The paper's ablations: rows that can be run, checkpoints of ours under evaluation, tables that say what is missing."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.config import ConfigError, TokenizerConfig, load_pipeline_config
from data_pipeline.records import Batch
from data_pipeline.tokenizer import import_tokenizer
from eval.ablation_rows import FOLDER, Setup, load_tables, steps
from eval.ablation_table import as_markdown, render
from eval.ablations import job_script, main, pretraining_is_complete
from eval.report import main as report_main
from eval.run import main as run_main
from eval.source import ModelSource
from eval.tasks import TaskError
from pretrain.checkpoint import TrainerState, file_records, incomplete_folder, publish, write_state, write_weights
from pretrain.config import load_config
from pretrain.encoder import BertForPreTraining
from pretrain.model_config import EncoderConfig

WORDS = ["the", "a", "film", "it", "was", "good", "bad"]
TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "intermediate": 64,
    "max_positions": 128,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "sentence_objective": "none",
    "causal": True,
    "initializer_range": 0.1,
}


def setup(size: str, root: Path, **more: object) -> Setup:
    return Setup(
        size=size, config=FOLDER / f"{size}.toml", root=root, data=Path("data"), launcher=("deepspeed",), **more
    )


@pytest.mark.parametrize("size", ["small", "base"])
def test_every_row_is_a_configuration(size: str, tmp_path: Path) -> None:
    """Every shipped configuration can be used, with what each row changes in it."""
    runs = {row.run: row for table in load_tables() for row in table.rows}
    assert len(runs) == 13
    models = {}
    for name, row in runs.items():
        settings = setup(size, tmp_path).run_settings(row)
        config = load_config(FOLDER / f"{size}.toml", settings)
        load_pipeline_config(FOLDER / f"{size}.toml", settings)
        models[name] = (config.model, config.data.masked_share, config.data.random_share)
    assert len({str(model) for model in models.values()}) == 13  # no two runs are the same
    ltr, masked, random = models["ltr"]
    assert ltr.causal and ltr.sentence_objective == "none" and masked == random == 0
    widths = [models[name][0].hidden * models[name][0].layers for name in ("size-3-768-12", "bert", "size-24-1024-16")]
    assert widths == sorted(widths) and len(set(widths)) == 3


def test_the_plan_has_each_pretraining_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--plan", "--data", "data", "--root", str(tmp_path)]
    assert main([*plan, "--table", "objectives", "--tasks", "RTE", "--set", "train.steps=300"]) == 0
    said = capsys.readouterr().out
    assert (
        said.count("pretrain/run.py") == 3 and said.count("-m eval.run") == 4 and said.count("data_pipeline.build") == 2
    )
    assert said.index("data_pipeline.build") < said.index("pretrain/run.py") < said.index("-m eval.run")
    assert f"--model {tmp_path}/ltr/pretrain" in said and "--bilstm 1 --seeds 5" in said
    assert said.count("data.masked_share=0") == 2 and f"data.tokens_from={tmp_path}/data" in said
    assert len(steps(setup("small", tmp_path), load_tables())) == 1 + 6 + 13 + 1 + 15  # rows share tasks or not
    for wrong, message in (
        (["--table", "sizes"], "no such table"),
        (["--rows", "x"], "no such run"),
        (["--seeds", "0"], "too small"),
    ):
        assert main([*plan, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_token_is_predicted_from_those_before_it() -> None:
    """The left-to-right objective: neither the predicted token nor what follows it reaches its own loss."""
    torch.manual_seed(0)
    model = BertForPreTraining(EncoderConfig(**TINY, vocab_size=20)).eval()
    ids = torch.tensor([2, 7, 8, 9, 3, 2, 11, 12, 3])

    def loss(ids: torch.Tensor, place: int) -> float:
        batch = Batch(
            input_ids_T=ids,
            segment_ids_T=torch.zeros_like(ids),
            position_ids_T=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]),
            cu_seqlens=torch.tensor([0, 5, 9], dtype=torch.int32),
            max_seqlen=5,
            mask_positions_P=torch.tensor([place]),
            mask_labels_P=torch.tensor([15]),
            cls_positions_E=torch.tensor([0, 5]),
            nsp_labels_E=torch.tensor([-1, -1]),
        )
        return float(model(batch).mlm_loss_sum.detach())

    changed = ids.clone()
    changed[7:] = torch.tensor([13, 14])
    assert loss(ids, 7) == loss(changed, 7) and loss(ids, 8) != loss(changed, 8)
    assert loss(ids, 6) == pytest.approx(loss(torch.cat([ids[:1] + 4, ids[1:]]), 6))  # other examples are out of sight


@pytest.fixture(scope="module")
def checkpoint(write_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a causal encoder that was "trained" for 1000 steps; its data folder has the tokenizer."""
    root = tmp_path_factory.mktemp("ablations")
    tokenizer = import_tokenizer(write_bert(root / "bert-vocabulary", WORDS), TokenizerConfig())
    tokenizer.save(root / "data" / "tokenizer")
    config = load_config(FOLDER / "small.toml", [f"data.dir={root}/data", f"run.dir={root}/ltr/pretrain"])
    encoder = EncoderConfig(**TINY, vocab_size=tokenizer.vocab_size)
    tree = config.as_tree() | {"model": encoder.model_dump(mode="json")}
    torch.manual_seed(0)
    model = BertForPreTraining(encoder)
    state = TrainerState(
        step=1000,
        skipped_steps=0,
        skipped_in_a_row=0,
        run_id="a",
        loader={},
        world_size=1,
        zero_stage=1,
        precision="fp32",
        tokenizer=tokenizer.fingerprint,
        data="",
        git="",
        config=tree,
    )
    steps_folder = root / "ltr" / "pretrain" / "checkpoints"
    folder = incomplete_folder(steps_folder, 1000)
    folder.mkdir(parents=True)
    write_weights(folder, dict(model.named_parameters()))
    write_state(folder, state)
    publish(steps_folder, 1000, file_records(folder))
    lines = [{"kind": "train", "step": 900, "mlm_loss": 3.0}, {"kind": "validation", "step": 900, "perplexity": "inf"}]
    (root / "ltr" / "pretrain" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "ltr" / "pretrain" / "run.json").write_text(
        json.dumps({"config": tree, "parameters": 12345, "name": "ltr"})
    )
    return root / "ltr" / "pretrain"


def test_our_checkpoint_is_evaluated_as_it_is_and_with_a_bilstm(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "RTE").mkdir()
    for split, rows in (("train", 96), ("dev", 40)):
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for n, label in enumerate(rng.integers(0, 2, rows)):
            text = " ".join([*rng.choice(WORDS[:5], rng.integers(2, 5)), ["bad", "good"][label]])
            lines.append(f"{n}\tthe film\t{text}\t{['not_entailment', 'entailment'][label]}")
        (tmp_path / "RTE" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    output, fast = checkpoint.parent / "eval", ["--max-length", "32", "--learning-rate", "0.005", "--epochs", "4"]
    command = ["--model", str(checkpoint), "--data", str(tmp_path), "--output", str(output), "--tasks", "RTE", *fast]
    assert run_main([*command, "--batch-size", "8"]) == 0
    assert run_main([*command, "--batch-size", "8", "--bilstm", "1", "--seeds", "2"]) == 0
    results = json.loads((output / "results.json").read_text())["results"]
    plain, stacked = sorted(results, key=lambda group: group.get("bilstm", 0))
    assert (stacked["bilstm"], stacked["seeds"], plain["seeds"]) == (1, [0, 1], [0]) and plain["model"] == stacked[
        "model"
    ]
    # The word that decides stands at the end: only a head that reads the last state of a left-to-right encoder sees it.
    assert plain["splits"]["dev"]["metrics"]["accuracy"]["mean"] == 1.0
    tables = render(load_tables(), checkpoint.parent.parent)
    objectives = next(table for table in tables if table["header"][0] == "objectives")
    assert objectives["header"][-1] == "RTE, accuracy"
    cells = {row[0]: row for row in objectives["rows"]}
    assert cells["LTR & No NSP"][1] == "12,345" and cells["LTR & No NSP"][-1] == "100.0, n=1"
    assert ", n=2" in cells["LTR & No NSP + BiLSTM"][-1] and " ± " in cells["LTR & No NSP + BiLSTM"][-1]
    assert cells["BERT"][2:4] == ["– (84.4)", "– (88.4)"] and "BERT: no pretraining yet" in objectives["notes"]
    assert "LTR & No NSP: pretraining is at step 900 of 1000" in objectives["notes"]
    assert "| LTR & No NSP | 12,345 | – (82.1) |" in as_markdown(tables)
    # The tables stand above the runs in the report.
    root = checkpoint.parent.parent
    assert main(["--show", "--root", str(root)]) == 0
    assert report_main(["--runs", str(root), "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Pre-training tasks: ours (the paper&#39;s, table 5" in page and "100.0, n=1" in page
    capsys.readouterr()


def test_sources_of_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    source, same = ModelSource(checkpoint), ModelSource(checkpoint / "checkpoints" / "step-000001000", bilstm=2)
    assert source.fingerprint == same.fingerprint and source.encoder().config.causal and source.encoder().bilstm is None
    first, again, other = (same.encoder(seed).bilstm for seed in (1, 1, 2))
    assert first is not None and again is not None and other is not None and first.num_layers == 2
    assert torch.equal(first.weight_hh_l0, again.weight_hh_l0) and not torch.equal(
        first.weight_hh_l0, other.weight_hh_l0
    )
    with pytest.raises(TaskError, match=r"no config.json.*no complete checkpoint here"):
        ModelSource(tmp_path)
    row = next(row for table in load_tables() for row in table.rows if row.run == "ltr")
    # Complete is what has the last step of the settings that are asked for: this one has another model.
    assert not pretraining_is_complete(setup("small", checkpoint.parent.parent), row)
    same_model = tuple(
        f"model.{key}={value}" for key, value in json.loads(json.dumps(TINY)).items() if key not in ("causal",)
    )
    plain = row.model_copy(update={"set": ("model.causal=true",)})
    assert pretraining_is_complete(setup("small", checkpoint.parent.parent, overrides=same_model), plain)
    longer = (*same_model, "train.steps=2000")
    assert not pretraining_is_complete(setup("small", checkpoint.parent.parent, overrides=longer), plain)
    with pytest.raises(ConfigError):
        load_tables(tmp_path / "none.toml")


def test_an_interrupted_command_leaves_nothing_behind() -> None:
    """The command, and what it has started in the background. SIGINT may be ignored where the tests run, SIGTERM is not."""
    code = "from eval.ablations import call; call(['bash', '-c', 'sleep 600 & echo $!; wait'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    sleeper = Path("/proc", process.stdout.readline().strip())
    assert sleeper.is_dir()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) != 0
    assert not (sleeper / "cmdline").exists() or not (sleeper / "cmdline").read_bytes()  # gone, or a zombie


def test_jobs_of_a_cluster_run_the_same_commands(tmp_path: Path) -> None:
    every = [step for _, step in steps(setup("small", tmp_path / "a folder"), load_tables()[:1])]
    script = job_script("ablation-x", every[:2], ["--gpus=2", "--time=1:00:00"], tmp_path / "a folder")
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=ablation-x\n") and "#SBATCH --gpus=2\n" in script
    assert f'#SBATCH --output="{tmp_path}/a folder/ablation-x-%j.log"\n' in script
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    lines = script.splitlines()
    assert lines.index("set -e") < len(lines) - 2 and [shlex.split(line) for line in lines[-2:]] == [
        list(step.command) for step in every[:2]
    ]
