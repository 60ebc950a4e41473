"""Distillation on two ranks in each ZeRO stage, and the export of what these runs saved: one launch, many assertions."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from data_pipeline.loader import build_loader
from data_pipeline.shard_index import ShardIndex
from data_pipeline.tokenizer_folder import SPECIAL_TOKENS, Normalisation
from data_pipeline.wordpiece import WordPieceTokenizer
from pretrain.checkpoint import list_steps, load_model_weights, read_state
from pretrain.config import DistillationConfig
from pretrain.distillation import DistillationObjective, start_student
from pretrain.encoder import BertForPreTraining
from pretrain.export import export_to_hf, load_checkpoint_model
from pretrain.export import main as export_main
from pretrain.hf_import import import_from_hf
from pretrain.model_config import EncoderConfig, load_encoder_config
from pretrain.parameter_groups import parameter_groups

WORKER = Path(__file__).with_name("model_worker.py")
STAGES = (1, 2, 3)

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., ShardIndex]) -> Path:
    """A folder with data/, teacher/ and the run folders stage-1 to stage-3 of two ranks."""
    root = tmp_path_factory.mktemp("runs")
    flags = Normalisation(lowercase=True, strip_accents=True, split_cjk=True)
    tokenizer = WordPieceTokenizer([*SPECIAL_TOKENS, *(f"word{number}" for number in range(95))], flags)
    tokenizer.save(root / "data" / "tokenizer")
    for part, blocks in (("train", 6), ("validation", 2)):
        folder = root / "data" / part
        write_dataset(folder, shards=2, blocks=blocks, examples=9, seed=blocks, tokenizer=tokenizer.fingerprint)
    torch.manual_seed(0)
    sizes = {"layers": 4, "hidden": 32, "heads": 2, "intermediate": 64, "vocab_size": 100, "initializer_range": 0.2}
    export_to_hf(BertForPreTraining(load_encoder_config(sizes)).eval(), root / "data" / "tokenizer", root / "teacher")
    launch(root)
    return root


def launch(root: Path) -> None:
    """Two ranks of the worker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(WORKER), str(root / "data"), str(root / "teacher"), str(root)]
    processes = []
    for rank in range(2):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        with open(root / f"rank-{rank}.log", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join((root / f"rank-{rank}.log").read_text()[-3000:] for rank in range(2))


def checkpoint_of(runs: Path, stage: int) -> Path:
    (folder,) = list_steps(runs / f"stage-{stage}" / "checkpoints")
    assert (read_state(folder).zero_stage, read_state(folder).world_size) == (stage, 2)
    return folder


@pytest.fixture(scope="module")
def plain(runs: Path) -> tuple[BertForPreTraining, list[float]]:
    """The same four steps in one process by plain torch: weights and the loss of each step."""
    teacher = import_from_hf(runs / "teacher", pad_vocab_to=8).model
    model = BertForPreTraining(EncoderConfig.model_validate(read_state(checkpoint_of(runs, 1)).config["model"]))
    assert start_student(model, teacher) == []
    objective = DistillationObjective(model, teacher, DistillationConfig(teacher="x")).train()
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in parameter_groups(model, 0.01)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    losses = []
    with build_loader(runs / "data" / "train", global_batch=16, micro_batch=4, seed=3) as loader:
        for _ in range(4):
            batches = next(loader)
            counts = (sum(len(b.mask_labels_P) for b in batches), 1.0, sum(b.tokens for b in batches))
            parts = [objective(batch, 1 / torch.tensor(counts))[0] for batch in batches]
            total = torch.stack(parts).sum()
            total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
    return model, losses


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_distil_as_one_process_of_plain_torch(runs, plain, stage):
    model, losses = plain
    weights = load_model_weights(checkpoint_of(runs, stage))
    named = dict(model.named_parameters())
    assert weights.keys() == named.keys()  # no tensor of the teacher is saved
    assert max(float((weights[name] - named[name]).detach().abs().max()) for name in named) < 2e-6
    lines = [json.loads(line) for line in (runs / f"stage-{stage}" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["loss"] for line in trained] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    for line in trained:
        assert line["loss"] == pytest.approx(line["mlm_loss"] + line["distillation_loss"])
    (held_out,) = [line for line in lines if line["kind"] == "validation"]
    assert 0 < held_out["mlm_loss"] < 20
    # The data have labels of pairs, the student has no sentence head: no accuracy of 0 is made up.
    assert [line["nsp_accuracy"] for line in lines] == [None] * len(lines)
    assert "NSP" not in (runs / "rank-0.log").read_text()
    assert "student of 2 layers from the 4 of" in (runs / "rank-0.log").read_text()


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_of_every_stage_export(runs, tmp_path, stage, capsys):
    checkpoint = checkpoint_of(runs, stage)
    assert export_main(["--checkpoint", str(runs / f"stage-{stage}"), "--output", str(tmp_path / "export")]) == 0
    assert "DistilBertForMaskedLM of step 4" in capsys.readouterr().out
    model, _ = load_checkpoint_model(checkpoint)
    back = import_from_hf(tmp_path / "export", pad_vocab_to=8)
    assert not back.missing and not back.unused
    read = back.model.state_dict()
    for name, tensor in model.state_dict().items():
        rows = 100 if len(tensor) == 104 else len(tensor)  # padding rows of the vocabulary are trimmed
        assert torch.equal(tensor[:rows], read[name][:rows]), name
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "export")
    assert type(loaded).__name__ == "DistilBertForMaskedLM"
