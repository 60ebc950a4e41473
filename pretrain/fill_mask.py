"""`python -m pretrain.fill_mask --model DIR "text with [MASK]"`: what an exported model puts there, for a human look.

Here alone the marker `[MASK]` in a text is the mask token; everywhere else it is ordinary text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from data_pipeline.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from pretrain.encoder import BertForPreTraining
from pretrain.hf_config import InterchangeError
from pretrain.hf_import import import_from_hf

MARKER = "[MASK]"


@torch.no_grad()
def fill_mask(
    model: BertForPreTraining, tokenizer: Tokenizer, text: str, top: int = 5
) -> list[list[tuple[str, float]]]:
    """The likeliest entries at each `[MASK]` of a text.

    Args:
        model: in evaluation mode.
        tokenizer: of the model.
        text: with one or more `[MASK]`, exactly so written; `[mask]` is ordinary text.
        top: entries for each.

    Returns:
        for each mask, (entry, probability), likeliest first.

    Raises:
        ValueError: no `[MASK]` in the text, or it has more tokens than the model has positions.
    """
    pieces = text.split(MARKER)
    if len(pieces) == 1:
        raise ValueError(f"the text has no {MARKER}: write it where the model shall fill in")
    ids = [tokenizer.cls_id]
    masks = []
    for number, piece in enumerate(pieces):
        if number:
            masks.append(len(ids))
            ids.append(tokenizer.mask_id)
        ids += tokenizer.encode_flat([piece])[0].tolist()
    ids.append(tokenizer.sep_id)
    input_ids_T = torch.tensor(ids)
    zeros_T, ends = torch.zeros_like(input_ids_T), torch.tensor([0, len(ids)], dtype=torch.int32)
    x_TD = model.encoder(input_ids_T, zeros_T, torch.arange(len(ids)), ends, len(ids))
    places = torch.tensor(masks) - int(model.config.causal)  # left to right: predicted from the state before
    likely = model.mlm_head.logits(x_TD[places], model.word_embedding).softmax(-1).topk(top)
    return [
        [(tokenizer.tokens[entry], share) for entry, share in zip(entries, shares, strict=True)]
        for entries, shares in zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 done, 2 the model or text cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m pretrain.fill_mask", description="Fill in [MASK].")
    parser.add_argument("--model", required=True, type=Path, help="a folder that `pretrain.export` wrote")
    parser.add_argument("--top", type=int, default=5, help="entries for each mask")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="text with [MASK]")
    parsed = parser.parse_args(arguments)
    try:
        tokenizer = load_tokenizer(parsed.model)
        model = import_from_hf(parsed.model).model
        for text in parsed.texts:
            print(text)
            for entries in fill_mask(model, tokenizer, text, parsed.top):
                print("  " + "  ".join(f"{entry} {share:.1%}" for entry, share in entries))
    except (InterchangeError, TokenizerError, ValueError) as error:
        print(f"fill_mask: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
