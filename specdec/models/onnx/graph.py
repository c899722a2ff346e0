"""ONNX graphs of Llama-like models, for ONNX Runtime on a CPU.

A graph is one pass over R rows of one request. ONNX Runtime's GroupQueryAttention appends the rows'
keys and values in place to the request's own cache; an additive mask says which slots a tree row
sees. Weights are not stored in the graph: the session gets them as arrays in memory.

Shape letters: R rows, N slots in use after the pass, C capacity in slots, A rows whose logits are
computed, E hidden size, H query heads, G key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from specdec.attention.tree_attention import ScoreOptions
from specdec.models.exits import ReducedOutput
from specdec.models.onnx.support import head_size
from specdec.models.packing import BLOCK, bits_of, packed
from specdec.models.runner import ModelSlice
from specdec.models.slicing import final_norm, layers_name
from specdec.types import HiddenName

_OPSET, _IR_VERSION = 18, 10
_MICROSOFT = "com.microsoft"  # domain of ONNX Runtime's own operators
_FLOAT, _INT64, _INT32, BOOL = 1, 7, 6, 9  # values of onnx.TensorProto.DataType
QUANTISED = "MatMulNBits"
# GroupQueryAttention wants a row of rotary values per slot of the cache, and a cache has slots for
# other branches beside the path that fills the context. Rows beyond the context are not read.
_BRANCH_SLOTS = 1 << 14


def mask_name(window: int | None) -> str:
    return "mask" if window is None else f"mask_{window}"


@dataclass(kw_only=True, eq=False)
class Graph:
    model: bytes  # serialised ``onnx.ModelProto``; its initializers are external data
    # name -> array of every large initializer, float32 or packed codes
    weights: dict[str, np.ndarray[Any, Any]]


def with_exact_products(graph: Graph) -> Graph:
    from onnx import ModelProto

    model = ModelProto.FromString(graph.model)
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == QUANTISED else ():
            if attribute.name == "accuracy_level":
                attribute.i = 0
    return replace(graph, model=model.SerializeToString())


def epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


def build_graph(layers: ModelSlice, bits: int | None = None) -> Graph:
    """Returns an ONNX graph of a pass of a slice, whose family must be in ``FAMILIES``. Linear
    layers and the output head are quantised to ``bits`` per weight; None leaves float32.

    The outputs ``state_0``, ``state_1``, ... are the slice's output, then the captured states.
    """
    model, num_layers = layers.model, len(layers.options)
    config, rotary = model.config.get_text_config(), model.base_model.rotary_emb
    states = list(dict.fromkeys([layers.output, *layers.capture]))
    first = layers.first_layer
    writer = GraphWriter(config, rotary, layers.options, bits, first)  # type: ignore[arg-type]
    if layers.is_first:
        table = writer.weight("embeddings", model.get_input_embeddings().weight)
        stream = writer.op("Gather", table, writer.declare_indices("tokens", [1, "R"]))
    else:
        stream = writer.declare_floats("hidden", [1, "R", config.hidden_size])
    writer.declare_rows()
    found: dict[HiddenName, str] = {}
    update: str | None = None
    for index, layer in enumerate(model.get_submodule(layers_name(model))):  # type: ignore[arg-type]
        name = HiddenName(first + index)
        stream, update = writer.layer(index, layer, stream, update)
        if name in states or index == num_layers - 1:
            stream, update = writer.op("Add", stream, update), None
            found[name] = stream
    if layers.is_last:
        normed, _ = writer.norm(final_norm(model), stream, None)
        found[layers.output._replace(normed=True)] = normed
        output = model.get_output_embeddings()
        assert isinstance(output, nn.Linear)
        rows = writer.declare_indices("logits_rows", ["A"])
        chosen = writer.op("Gather", normed, rows, axis=1)
        logits = writer.linear("output", [output], chosen)
        if isinstance(output, ReducedOutput):
            logits = writer.spread(logits, output.ids, output.vocab_size)
        writer.output("logits", logits, ["one", "A", "V"])
    for number, state in enumerate(states):
        writer.output(f"state_{number}", found[state], ["one", "R", "E"])
    return writer.finish()


@dataclass
class GraphWriter:
    config: PreTrainedConfig
    # the module of the rotary embeddings; None in a graph without attention
    rotary: Callable[..., Any] | None = None
    # layer of the graph -> scaling and window of its attention. Default: none.
    options: Mapping[int, ScoreOptions] = field(default_factory=dict)
    bits: int | None = None  # bits per weight in matrices of ``linear``; None: float32
    first_layer: int = 0  # number of the graph's first layer in its model
    weights: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    # id of a norm's module -> name of its weight
    norms: dict[int, str] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        return self.ops(kind, inputs, [f"v{len(self.nodes)}"], domain, **attributes)[0]

    def ops(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: list[str],
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs

    def declare(self, where: list[Any], name: str, kind: int, shape: Sequence[int | str]) -> str:
        from onnx import helper

        where.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, value: str, shape: Sequence[int | str]) -> None:
        self.ops("Identity", [value], [name])
        self.declare(self.outputs, name, _FLOAT, shape)

    def declare_floats(self, name: str, shape: Sequence[int | str]) -> str:
        return self.declare(self.inputs, name, _FLOAT, shape)

    def declare_indices(self, name: str, shape: Sequence[int | str]) -> str:
        return self.declare(self.inputs, name, _INT64, shape)

    def declare_rows(self) -> None:
        self.declare_indices("positions", [1, "R"])
        self.declare(self.inputs, "last_slot", _INT32, [1])
        self.declare(self.inputs, "num_slots", _INT32, [1])
        for window in dict.fromkeys(option.window for option in self.options.values()):
            self.declare_floats(mask_name(window), [1, 1, "R", "N"])

    def weight(self, name: str, value: Tensor) -> str:
        if name not in self.weights:
            self.weights[name] = np.ascontiguousarray(value.detach().float().cpu().numpy())
        return name

    def linear(self, name: str, parts: Sequence[nn.Linear], value: str) -> str:
        product = self.product(name, parts, value)
        if parts[0].bias is None:
            return product
        bias = torch.cat([part.bias for part in parts])
        return self.op("Add", product, self.weight(f"{name}.bias", bias))

    def product(self, name: str, parts: Sequence[nn.Linear], value: str) -> str:
        matrix, weight = f"{name}.weight", torch.cat([part.weight for part in parts])
        if self.bits is None:
            return self.op("MatMul", value, self.weight(matrix, weight.T))
        bits = bits_of(name, self.bits)
        self.weights[matrix], self.weights[f"{matrix}.scales"] = packed(weight, bits)
        return self.op(
            QUANTISED,
            value,
            matrix,
            f"{matrix}.scales",
            domain=_MICROSOFT,
            K=parts[0].in_features,
            N=sum(part.out_features for part in parts),
            bits=bits,
            block_size=BLOCK,
            accuracy_level=4,  # activations are rounded to 8 bits: the fast kernels
        )

    def spread(self, logits: str, ids: Tensor, vocab_size: int) -> str:
        first = self.op("Gather", logits, self.constant("first", [0]), axis=-1)
        minus_infinity = self.weight("minus_infinity", torch.tensor([-torch.inf]))
        # first - first is 0 and has the shape of a column.
        column = self.op("Add", self.op("Sub", first, first), minus_infinity)
        both = self.op("Concat", logits, column, axis=-1)
        places = torch.full((vocab_size,), len(ids)).index_copy(0, ids, torch.arange(len(ids)))
        return self.op("Gather", both, self.constant("places", places.tolist()), axis=-1)

    def norm(self, module: nn.Module, value: str, update: str | None) -> tuple[str, str]:
        """Writes the RMS norm of ``value + update``; returns the names of the norm and the sum."""
        weight: Tensor = module.weight  # type: ignore[assignment]
        name = self.norms.setdefault(id(module), f"norm{len(self.norms)}.weight")
        name, eps = self.weight(name, weight), epsilon(module)
        if update is None:
            out = self.op("SimplifiedLayerNormalization", value, name, axis=-1, epsilon=eps)
            return out, value
        outputs = [f"v{len(self.nodes)}", "", "", f"sum{len(self.nodes)}"]
        kind = "SkipSimplifiedLayerNormalization"
        self.ops(kind, [value, update, name], outputs, _MICROSOFT, epsilon=eps)
        return outputs[0], outputs[3]

    def layer(self, index: int, layer: Any, stream: str, update: str | None) -> tuple[str, str]:
        """Writes a decoder layer whose input is ``stream + update``. Returns the names of two
        values whose sum is its output; the fused operator of the next norm adds them.
        """
        normed, stream = self.norm(layer.input_layernorm, stream, update)
        attended = self.attention(index, layer.self_attn, normed)
        update = self.linear(f"{index}.o", [layer.self_attn.o_proj], attended)
        normed, stream = self.norm(layer.post_attention_layernorm, stream, update)
        return stream, self.mlp(index, layer.mlp, normed)

    def mlp(self, index: int, mlp: Any, normed: str) -> str:
        both = self.linear(f"{index}.gate_up", [mlp.gate_proj, mlp.up_proj], normed)
        gate, up = self.split(both, [mlp.gate_proj.out_features, mlp.up_proj.out_features])
        # x * sigmoid(x): QuickGelu with factor 1.
        gate = self.op("QuickGelu", gate, domain=_MICROSOFT, alpha=1.0)
        product = self.op("Mul", gate, up)
        return self.linear(f"{index}.down", [mlp.down_proj], product)

    def attention(self, index: int, attention: Any, value: str) -> str:
        config, options = self.config, self.options[index]
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        size = head_size(config)
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        packed = self.linear(f"{self.first_layer + index}.qkv", parts, value)
        query, key, values = packed, "", ""
        if hasattr(attention, "q_norm"):  # a norm per head (Qwen3)
            query, key, values = self.split(packed, [part.out_features for part in parts])
            query = self.head_norm(attention.q_norm, query, heads, size)
            key = self.head_norm(attention.k_norm, key, groups, size)
        shape = [1, groups, "C", size]
        names = [f"{name}_{index}" for name in ("keys", "values")]
        past = [self.declare(self.inputs, f"past_{name}", _FLOAT, shape) for name in names]
        new = [self.declare(self.outputs, name, _FLOAT, shape) for name in names]
        places = ["last_slot", "num_slots", *self.rotary_tables(), "positions"]
        return self.ops(
            "GroupQueryAttention",
            [query, key, values, *past, *places, mask_name(options.window)],
            [f"attended_{index}", *new],
            _MICROSOFT,
            num_heads=heads,
            kv_num_heads=groups,
            do_rotary=1,
            scale=float(options.scaling or size**-0.5),
        )[0]

    def head_norm(self, module: nn.Module, value: str, heads: int, size: int) -> str:
        apart = self.op("Reshape", value, self.constant(f"apart_{heads}", [1, -1, heads, size]))
        normed, _ = self.norm(module, apart, None)
        return self.op("Reshape", normed, self.constant(f"flat_{heads}", [1, -1, heads * size]))

    def split(self, value: str, sizes: list[int]) -> list[str]:
        names = [f"part{len(self.nodes)}_{i}" for i in range(len(sizes))]
        constant = self.constant("sizes_" + "_".join(map(str, sizes)), sizes)
        return self.ops("Split", [value, constant], names, axis=-1)

    def constant(self, name: str, values: list[int]) -> str:
        from onnx import numpy_helper

        if name not in {known.name for known in self.constants}:
            self.constants.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def rotary_tables(self) -> tuple[str, str]:
        """Registers rotary cosines and sines, [positions, D / 2] each, and returns their names."""
        if "cosines" not in self.weights:
            assert self.rotary is not None, "attention needs rotary embeddings"
            places = torch.arange(self.config.max_position_embeddings)[None]
            with torch.inference_mode():
                tables = self.rotary(torch.zeros(1), places)
            for name, table in zip(("cosines", "sines"), tables, strict=True):
                half = table[0, :, : head_size(self.config) // 2]
                self.weight(name, pad(half, (0, 0, 0, _BRANCH_SLOTS)))
        return "cosines", "sines"

    def finish(self) -> Graph:
        from onnx import TensorProto, helper

        external = []
        for name, array in self.weights.items():
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            entry = TensorProto(name=name, data_type=kind, dims=array.shape)
            entry.data_location = TensorProto.EXTERNAL
            entry.external_data.add(key="location", value="memory")
            external.append(entry)
        graph = helper.make_graph(
            self.nodes, "specdec", self.inputs, self.outputs, [*external, *self.constants]
        )
        domains = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_MICROSOFT, 1)]
        proto = helper.make_model(graph, opset_imports=domains, ir_version=_IR_VERSION)
        return Graph(model=proto.SerializeToString(), weights=self.weights)
