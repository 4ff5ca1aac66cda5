"""Whole language and speech networks from ONNX, with their pasts as states on the device: the results of torch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from rlx.errors import InputShapeError, ModelError
from rlx.frontends.onnx import OnnxModel
from tests.onnx_models import parsed
from tests.onnx_networks import GenAI, decoder, encoder, llama, whisper

IDS = np.random.default_rng(0).integers(3, 96, (1, 22))
MEL = torch.from_numpy(np.random.default_rng(1).standard_normal((1, 16, 40), np.float32))


def check_steps(model, want, **more):
    """A prompt of 6 tokens, then one after the other: results as `want` has them for all tokens at once."""
    done, asked = 0, {i.name for i in model.inputs}
    for rows in (6, *[1] * 16):
        end = done + rows
        feeds = {"input_ids": IDS[:, done:end], "attention_mask": np.ones((1, end), np.int64), **more}
        feeds["position_ids"] = np.arange(done, end)[None]
        (found,) = model.run({name: x for name, x in feeds.items() if name in asked}).values()
        np.testing.assert_allclose(found, want[:, done:end], atol=2e-5 * np.abs(want).max())
        done = end
    assert model.filled == 22 and len(model.reasons) == 2  # one executable for the prompt, one for a token


def of_torch(network, **more):
    with torch.inference_mode():
        return network(torch.from_numpy(IDS), **more)[0].numpy()


def test_an_exported_llama_decodes_with_its_past_on_the_device():
    model = OnnxModel(decoder(llama(), 2), states=24)
    check_steps(model, of_torch(llama()))
    assert "reshape" not in {step.kernel.name for step in token(model).program().steps}, "heads are repeated for their queries"


@pytest.mark.parametrize("weights", ["f32", "nbits", "int4"])
def test_a_llama_with_operators_of_onnx_runtime_writes_its_past_in_place(weights):
    made = GenAI(llama(), weights)
    proto, network = made.model(), copy.deepcopy(llama())
    network.load_state_dict(made.values)
    model = OnnxModel(proto, states=24)
    check_steps(model, of_torch(network))
    model.reset()
    check_steps(model, of_torch(network))
    regions = token(model).memory_plan().regions
    elements = sum(w.numel() for w in made.values.values() if w.ndim == 2)
    bits = 40 if weights == "f32" else 4.6  # prompt and token read some matrices in other layouts; an f16 for 32 elements
    assert regions["params"] + regions["prepared"] < bits / 8 * elements + 9000  # tables of angles, and norms
    assert products(model) == 2 * 4 + 1  # q, k and v are one, gate and up too


def token(model, **more):
    """The executable for one more token."""
    feeds = {"input_ids": IDS[:, :1], "attention_mask": np.ones((1, model.filled), np.int64), "position_ids": IDS[:, :1]}
    return model.executable(feeds | more)


def products(model, **more):
    return sum("matmul" in step.kernel.name for step in token(model, **more).program().steps)


def test_states_in_place_that_are_full_are_named():
    model = OnnxModel(GenAI(llama()).model(), states=7)
    feeds = {"input_ids": IDS[:, :6], "attention_mask": np.ones((1, 6), np.int64), "position_ids": np.arange(6)[None]}
    model.run(feeds)
    with pytest.raises(InputShapeError, match="the states hold 7 rows, 6 are filled, and 6 more come"):
        model.run(feeds | {"attention_mask": np.ones((1, 12), np.int64)})


COUNTS = """agraph (float[1,rows,4] x, int64[1,total] attention_mask, int64[rows] position_ids, float[1,past,4] past_0)
    => (float[1,1,4] y, float[1,all,4] present_0)
    <int64[1] ends = {2}, int64[2] around = {0, 2}, int64[1] rows_axis = {1}, int64 one = {1}> {
  before = Shape <start = 1, end = 2> (past_0)  more = Shape <start = 1, end = 2> (x)  behind = Add (before, more)
  first = Squeeze (before)  last = Squeeze (behind)  places = Range (first, last, one)
  at = Cast <to = 1> (WHERE)  shift = Unsqueeze (at, around)  row = Add (x, shift)
  present_0 = Concat <axis = 1> (past_0, row)
  seen = Cast <to = 1> (attention_mask)  wide = Unsqueeze (seen, ends)  kept = Mul (present_0, wide)
  y = ReduceSum (kept, rows_axis)
}"""


def test_positions_that_are_counted_by_the_dims_of_the_past_are_refused_as_states():
    x = np.zeros((1, 2, 4), np.float32)
    feeds = [{"x": x[:, :n], "attention_mask": np.ones((1, end), np.int64), "position_ids": np.arange(end - n, end)}
             for n, end in ((2, 2), (1, 3))]  # fmt: skip
    given = OnnxModel(parsed(COUNTS.replace("WHERE", "position_ids")), states=24)
    y = [given.run(f)["y"][0, 0, 0] for f in feeds]
    assert y == [0 + 1, 0 + 1 + 2]
    with pytest.raises(ModelError, match=r"f32\[1,2,1\] depends on the rows .*: export it with position_ids"):
        OnnxModel(parsed(COUNTS.replace("WHERE", "places")), states=24).run(feeds[0])


def heard():
    with torch.inference_mode():
        return whisper().encoder(MEL).last_hidden_state


@pytest.mark.parametrize("dynamo", [False, True])
def test_whisper_hears(dynamo):
    np.testing.assert_allclose(OnnxModel(encoder(dynamo))(MEL.numpy()), heard(), atol=2e-5 * float(heard().abs().max()))


def test_whisper_decodes_with_its_past_on_the_device():
    image = heard()
    model, more = OnnxModel(decoder(whisper().decoder, 4, image=image), states=24), {"encoder_hidden_states": image.numpy()}
    check_steps(model, of_torch(whisper().decoder, encoder_hidden_states=image), **more)
    assert products(model, **more) == 2 * 6 + 1  # keys (without a bias) and values of the image are one for all layers
