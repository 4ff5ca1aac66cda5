"""Cases of ONNX's own backend tests that rlx does not pass, each with the reason. A case that passes must leave this list."""

from __future__ import annotations

import re

import onnx

RANDOM = "expected data are numpy's random numbers; ONNX leaves the generator open"

EXCLUDED = {  # pattern of whole names of cases -> reason
    r"test_ai_onnx_ml_(?!label_encoder).*": "operators of classical machine learning (ai.onnx.ml): trees and features",
    r"test_image_decoder_decode_.*": "the input is a file of an image format: decode it before",
    r"test_bernoulli(_double|_seed)?(_expanded)?": RANDOM,
    r"test_training_dropout(_default)?(_mask)?": RANDOM,
    r"test_dft_inverse(_opset19)?": "expected data are 1.9e-7, by rounding, where the result is 0; the tolerance is 1e-7",
    r"test_loop16_seq_none": "ONNX's own comparison fails: it takes the length of an array without dims",
}

ANY = {  # names of cases that pass on some processors: their results may be wrong, and they must run
    "test_bvlc_alexnet": "all weights are equal and so are the logits, 8e11; a column whose products a processor adds in another "
    "order differs in the last bit, 65,536, and the softmax behind it is 0",
}

if tuple(map(int, onnx.__version__.split(".")[:2])) < (1, 22):
    EXCLUDED |= {
        r"test_attention_.*_qk_matmul_(bias|softcap)(_[34]d_mask)?(_causal)?": "expected data have the mask before the soft cap: "
        "the text of opsets 23 and 24 has been corrected since",
        r"test_qlinearmatmul_[23]D_int8_float(16|32)": "expected data wrap, where they must saturate; later ones are right",
        r"test_adam_multiple": "expected data are those of another epsilon than the node's; later ones are right",
    }


def excluded(name: str) -> str | None:
    """The reason why a case is excluded; None: it is not."""
    return next((why for pattern, why in EXCLUDED.items() if re.fullmatch(pattern, name)), None)
