"""The export command: from a run's checkpoint to a folder, rerun without work, task scores on the card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from data_pipeline.tokenizer import load_tokenizer
from data_pipeline.tokenizer_folder import SPECIAL_TOKENS, Normalisation
from data_pipeline.wordpiece import WordPieceTokenizer
from eval.results import write_result, write_summary
from eval.source import ModelSource
from pretrain import checkpoint
from pretrain.encoder import BertForPreTraining
from pretrain.export import RECORD, main
from pretrain.hf_import import folder_fingerprint, import_from_hf
from pretrain.model_config import load_encoder_config

WORDS = ["the", "quick", "brown", "fox", "hello", "##s", "a", "b", "c", "d", ",", "$", ".", "cat"]
SMALL = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 64, "initializer_range": 0.1}
SMALL |= {"kernels": "triton"}  # of the machine that trained: an export runs where there is no GPU


def tokenizer_and_model(folder: Path) -> tuple[Path, BertForPreTraining]:
    flags = Normalisation(lowercase=True, strip_accents=True, split_cjk=True)
    WordPieceTokenizer([*SPECIAL_TOKENS, *WORDS], flags, folder).save(folder)
    torch.manual_seed(0)
    config = load_encoder_config(SMALL).with_vocabulary(len(SPECIAL_TOKENS) + len(WORDS), 0)
    return folder, BertForPreTraining(config).eval()


def write_checkpoint(run: Path, model: BertForPreTraining, tokenizer_dir: Path, step: int) -> Path:
    """A complete checkpoint as the trainer publishes it, without DeepSpeed's own files."""
    root = run / "checkpoints"
    folder = checkpoint.incomplete_folder(root, step)
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / checkpoint.WEIGHTS)
    state = checkpoint.TrainerState(
        step=step,
        skipped_steps=0,
        skipped_in_a_row=0,
        run_id="run",
        loader={},
        world_size=1,
        zero_stage=1,
        precision="fp32",
        tokenizer=load_tokenizer(tokenizer_dir).fingerprint,
        data="d" * 64,
        git="abc",
        config={"model": model.config.model_dump(mode="json"), "data": {"dir": str(tokenizer_dir.parent)}},
    )
    assert asdict(state)
    checkpoint.write_state(folder, state)
    return checkpoint.publish(root, step, checkpoint.file_records(folder))


def test_command_exports_the_newest_checkpoint_and_reuses_what_is_done(tmp_path, capsys):
    tokenizer_dir, model = tokenizer_and_model(tmp_path / "data" / "tokenizer")
    run, output = tmp_path / "run", tmp_path / "export"
    write_checkpoint(run, model, tokenizer_dir, 5)
    with torch.no_grad():
        model.mlm_head.bias += 1
    write_checkpoint(run, model, tokenizer_dir, 20)
    (run / "metrics.jsonl").write_text('{"kind": "validation", "step": 20, "mlm_accuracy": 0.4321}\n{broken\n')
    command = ["--checkpoint", str(run), "--output", str(output)]
    assert main(command) == 0
    assert "BertForPreTraining of step 20" in capsys.readouterr().out
    assert "0.4321" in (output / "README.md").read_text()
    back = import_from_hf(output, pad_vocab_to=8)
    assert torch.equal(back.model.mlm_head.bias[:19], model.mlm_head.bias[:19])
    before = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    assert main(command) == 0
    assert "exported already" in capsys.readouterr().out
    assert before == {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    assert main(["--checkpoint", str(run / "checkpoints" / "step-000000005"), "--output", str(output)]) == 0
    assert json.loads((output / RECORD).read_text())["step"] == 5
    assert main(["--checkpoint", str(tmp_path / "nothing"), "--output", str(output)]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


def result_of(model: str, task: str, seed: int, accuracy: float | None, **more) -> dict:
    """A result as eval.run writes it."""
    return {
        "schema": 1,
        "task": task,
        "task_version": 1,
        "recipe": {"learning_rate": 2e-5, "batch_size": 32, "epochs": 3},
        "seed": seed,
        "train_examples_limit": 0,
        "data_sha256": {"dev": "d"},
        "model": model,
        "tokenizer": "t",
        "headline": {"split": "dev", "metric": "accuracy"},
        "model_folder": "export",
        "train_examples": 2490,
        "seconds": 1.0,
        "warnings": [],
        "splits": {
            "dev": {"n": 277, "metrics": {"accuracy": {"value": accuracy, "undefined": ""}}, "baseline": {}},
        },
        **more,
    }


def test_task_scores_of_this_model_join_the_card(tmp_path, capsys):
    tokenizer_dir, model = tokenizer_and_model(tmp_path / "data" / "tokenizer")
    write_checkpoint(tmp_path / "run", model, tokenizer_dir, 7)
    output, scores = tmp_path / "export", tmp_path / "eval"
    command = ["--checkpoint", str(tmp_path / "run"), "--output", str(output)]
    assert main([*command, "--scores", str(scores)]) == 2  # the export is there all the same
    assert f"{scores / 'results.json'}: cannot be read" in capsys.readouterr().err
    fingerprint = folder_fingerprint(output)
    assert ModelSource(output).fingerprint == fingerprint
    write_result(scores, result_of("another model", "RTE", 0, 0.9))
    write_summary(scores)
    assert main([*command, "--scores", str(scores)]) == 2
    assert "holds 1 results, none of this model" in capsys.readouterr().err
    assert "Task scores" not in (output / "README.md").read_text()

    for seed, accuracy in enumerate([0.5, 0.7, 0.6]):
        write_result(scores, result_of(fingerprint, "RTE", seed, accuracy))
    write_result(scores, result_of(fingerprint, "MRPC", 0, 0.8, bilstm=1, start={"task": "MNLI"}))
    write_summary(scores)
    before = (output / RECORD).read_bytes(), (output / "model.safetensors").stat().st_mtime_ns
    assert main([*command, "--scores", str(scores)]) == 0
    assert "exported already; 2 task scores on its card" in capsys.readouterr().out
    card = (output / "README.md").read_text()
    recipe = "learning_rate 2e-05, batch_size 32, epochs 3, 2,490 examples"
    assert f"| RTE | accuracy | dev | 0.6000 | 0.1000 | 3 | {recipe} |" in card
    assert f"| MRPC | accuracy | dev | 0.8000 | - | 1 | {recipe}, BiLSTM of 1 on top, first on MNLI |" in card
    assert "another model" not in card and "0.9000" not in card
    assert "d" * 64 in card and load_tokenizer(tokenizer_dir).fingerprint in card and '"hidden": 32' in card
    assert before == ((output / RECORD).read_bytes(), (output / "model.safetensors").stat().st_mtime_ns)
    (scores / "results.json").write_text("[]")
    assert main([*command, "--scores", str(scores)]) == 2
    assert "not the results of eval.run" in capsys.readouterr().err
    assert main(command) == 0
    assert "Task scores" in (output / "README.md").read_text()  # a rerun without --scores leaves the card
