"""hibari's one ONNX graph, cut in memory at its latent into the talker's part and the decoder's part.

The latent `z` is [1, 130, F] float32: 128 text features, log F0, energy; F frames of 12.5 ms. The package's graph
multiplies in int8 and scales each activation by its extremes over the whole sequence, so a stretch of the decoder's
output depends on everything around it. The decoder's part therefore multiplies with the dequantised weights in
float32: then a frame depends on `CONTEXT` frames on either side and on nothing else.
"""

from importlib import resources

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper, utils

#: Frames on either side that a decoder frame sees: nine convolutions of seven taps.
CONTEXT = 27
#: What the decoder's part gives, each [1, 601, F] float32: log magnitude and phase of the harmonic branch, log
#: magnitude of the noise, log magnitude and phase of the free branch (names are the package's).
SPECTRA = ["lh", "theta", "ln", "lr", "phi"]


def asset(name: str) -> bytes:
    """Contents of a file that the `hibari` package ships."""
    return (resources.files("hibari") / "assets" / name).read_bytes()


def cut() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return (talker: ids [1, T] int64, speed [1] float32 -> z, f0 [1, F] float32; decoder: z -> `SPECTRA`)."""
    model = onnx.load_model_from_string(asset("hibari.onnx"))
    first = next(node for node in model.graph.node if list(node.input)[1:2] == ["m.dec_in.weight"])
    latent = first.input[0]
    extractor = utils.Extractor(model)
    talker = extractor.extract_model(["ids", "speed"], [latent, "f0"])
    decoder = extractor.extract_model([latent], SPECTRA)
    for part in (talker, decoder):
        _rename(part.graph, latent, "z")
    _dequantise(decoder.graph)
    return talker, decoder


def session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """Open a graph on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # An engine thread that spins between steps takes the core from the stage beside it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new
    for value in (*graph.input, *graph.output):
        if value.name == old:
            value.name = new


def _dequantise(graph: onnx.GraphProto) -> None:
    """Turn each DynamicQuantizeLinear, MatMulInteger, Cast, Mul chain into one float32 MatMul.

    The weight is (q - zero point) * scale, as ONNX defines both operators.
    """
    weights = {item.name: item for item in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}
    used_by = {name: node for node in graph.node for name in node.input}
    dead: set[str] = set()
    for matmul in [node for node in graph.node if node.op_type == "MatMulInteger"]:
        quantise = made_by[matmul.input[0]]
        cast = used_by[matmul.output[0]]
        scale = used_by[cast.output[0]]
        scales = made_by[next(name for name in scale.input if name != cast.output[0])]
        step = next(name for name in scales.input if name != quantise.output[1])
        quantised, zero = (numpy_helper.to_array(weights[matmul.input[i]]).astype(np.float32) for i in (1, 3))
        name = matmul.input[1].removesuffix("_quantized")
        weight = ((quantised - zero) * numpy_helper.to_array(weights[step])).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(weight, name))
        scale.CopyFrom(helper.make_node("MatMul", [quantise.input[0], name], [scale.output[0]], name=matmul.name))
        dead.update((quantise.output[0], matmul.output[0], cast.output[0], scales.output[0]))
    nodes = [node for node in graph.node if node.output[0] not in dead]
    used = {name for node in nodes for name in node.input}
    kept = [item for item in graph.initializer if item.name in used]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
