"""Text to tokens and back, and chats to text, for one model.

Owns: the Tokenizer façade; its making from a Hugging Face folder or a GGUF file; the cache of those built from GGUF.
Does not know: requests, sampling, HTTP. Never imports transformers (2 to 5 s of start-up), but
for a checkpoint with a response template.
Invariants: immutable after construction, so worker threads may share it. A chat rendered by `render_chat` already
contains its special tokens: encode it with add_special_tokens=False.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from aengine.errors import InvalidRequest, ModelLoadError
from aengine.models.chat import FALLBACK_TEMPLATE, ChatRenderer, Message
from aengine.models.config import eos_ids, read_json
from aengine.models.detokenize import ByteStream, DecoderStream, TextStream, TokenBytes
from aengine.models.gguf import GGUFFile, open_gguf
from aengine.models.gguf_config import gguf_eos_ids, special_id
from aengine.models.gguf_tokenizer import build_tokenizer
from aengine.models.response import ResponseTemplate, read_response_template
from aengine.models.store import ModelFiles

CACHE_SCHEMA = 1  # part of the cached file's name: raise it when building changes
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Tokens that end a turn in the templates of instruction-tuned models, for GGUF files that name only one end token.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|eom_id|>", "<|end|>")


class Tokenizer:
    """One model's vocabulary, special tokens and chat template.

    `vocab_size` counts added tokens; the model's own may be larger. `eos_ids`: every id that ends an answer, the main
    one first. `chat_template`: the model's own, None for a base model; then `has_chat_template` is False and
    `render_chat` uses a plain "User: .. Assistant:" form, which the caller should warn about.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        bos_id: int | None,
        eos_ids: Iterable[int],
        response_template: ResponseTemplate | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend, self._templates = backend, dict(templates)
        self._renderer = ChatRenderer(special_tokens)
        self._token_bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        self.response_template = response_template
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        self.chat_template: str | None = self._templates.get("default")
        self.has_chat_template = bool(self._templates)
        self._fallback = ("{{ bos_token }}" if self._adds_bos() else "") + FALLBACK_TEMPLATE

    def _adds_bos(self) -> bool:
        return self.bos_id is not None and self._backend.encode("").ids[:1] == [self.bos_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequest(param="prompt") for text that is not valid Unicode (a lone surrogate)."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(f"text cannot be tokenised: {error}", param="prompt") from error
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Unknown ids are left out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, possibly a part of a character; b"" for an unknown id."""
        return self._token_bytes(token)

    def token_text(self, token: int) -> str:
        """One token as text to show; bytes that are no whole character become U+FFFD."""
        return self._token_bytes(token).decode("utf-8", "replace")

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A new incremental decoder for one output."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._token_bytes.byte_level:
            return ByteStream(self._token_bytes, skipped)
        return DecoderStream(self._backend, skipped, self._token_bytes)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. `chat_template`: Jinja source, or the name of one of the model's own.

        `kwargs` are further template variables. Raises InvalidRequest: param "messages" when the template refuses the
        messages, "chat_template" when it does not compile.
        """
        return self._renderer.render(
            self._template(chat_template, tools),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=kwargs,
        )

    def _template(self, wanted: str | None, tools: Sequence[Message] | None) -> str:
        if wanted is not None:
            return self._templates.get(wanted, wanted)
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if self._templates and self.chat_template is None:
            names = ", ".join(sorted(self._templates))
            raise InvalidRequest(f"the model has several chat templates, name one of: {names}", param="chat_template")
        return self.chat_template if self.chat_template is not None else self._fallback


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The model's tokenizer and chat template. From GGUF it is built once and cached beside the file, or in home."""
    if files.kind == "gguf":
        return tokenizer_from_gguf(open_gguf(files.path), files.home)
    return tokenizer_from_folder(files.path)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """tokenizer.json with the special tokens and templates beside it.

    Which special tokens a text gets is what tokenizer.json says; add_bos_token and add_eos_token of
    tokenizer_config.json are older and often contradict it. Raises ModelLoadError when the file is missing or broken.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        others = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).exists()]
        hint = f" (found {', '.join(others)}: save it once as a fast tokenizer)" if others else ""
        raise ModelLoadError(f"{folder}: has no tokenizer.json{hint}")
    backend = _read_backend(path)
    settings = _optional_json(folder / "tokenizer_config.json")
    special = _special_tokens(settings, _optional_json(folder / "special_tokens_map.json"))
    _add_missing(backend, special)
    ends = eos_ids(_optional_json(folder / "config.json"), _optional_json(folder / "generation_config.json"))
    main = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Tokenizer(
        backend,
        templates=_templates(folder, settings),
        special_tokens=special,
        bos_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        eos_ids=(*ends, *([] if main is None else [main])),
        response_template=read_response_template(settings),
    )


def tokenizer_from_gguf(file: GGUFFile, home: Path) -> Tokenizer:
    """Built once (up to 5 s), then read from tokenizer JSON beside the file, or under home where that is read-only."""
    name = f"{file.path.stem}.{file.metadata_digest().hex()[:16]}.v{CACHE_SCHEMA}.tokenizer.json"
    places = (file.path.parent / name, home / "tokenizers" / name)
    backend = next((found for place in places if (found := _read_cached(place)) is not None), None)
    if backend is None:
        backend = build_tokenizer(file)
        _write_cached(backend, places)
    return _from_gguf(backend, file)


def _from_gguf(backend: Backend, file: GGUFFile) -> Tokenizer:
    template = file.metadata.get("tokenizer.chat_template")
    special = {}
    for name, kind in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = special_id(file, kind)
        text = None if index is None else backend.id_to_token(index)
        if text is not None:
            special[name] = text
    ends = list(gguf_eos_ids(file))
    if isinstance(template, str):
        known = ((token, backend.token_to_id(token)) for token in TURN_ENDS if token in template)
        ends += [index for _, index in known if index is not None]
    return Tokenizer(
        backend,
        templates={"default": template} if isinstance(template, str) else {},
        special_tokens=special,
        bos_id=special_id(file, "bos"),
        eos_ids=ends,
    )


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault
        raise ModelLoadError(f"{path}: cannot be read as a tokenizer: {error}") from error


def _read_cached(path: Path) -> Backend | None:
    try:
        return _read_backend(path) if path.exists() else None
    except ModelLoadError:
        return None  # a broken cache entry is rebuilt


def _write_cached(backend: Backend, places: Sequence[Path]) -> None:
    """To the first place that can be written, by a temporary file and a rename. No place is no error."""
    text = backend.to_str()
    for place in places:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=".tokenizer-")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as out:
                    os.fchmod(handle, 0o644)
                    out.write(text)
                os.replace(temporary, place)
            except OSError:
                os.unlink(temporary)
                raise
            return


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_tokens(settings: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token .. as text; either file may hold plain strings or objects with `content`."""
    out = {}
    for name in SPECIAL_NAMES:
        value = settings.get(name, special_map.get(name))
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            out[name] = text
    return out


def _add_missing(backend: Backend, special: Mapping[str, str]) -> None:
    """Named special tokens the tokenizer file itself does not mark as such."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    absent = [AddedToken(text, special=True, normalized=False) for text in special.values() if text not in known]
    if absent:
        backend.add_special_tokens(absent)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: chat_template.jinja and its siblings before what tokenizer_config.json holds."""
    value = settings.get("chat_template")
    out = {"default": value} if isinstance(value, str) else {}
    if isinstance(value, list):
        out = {str(entry["name"]): str(entry["template"]) for entry in value}
    single = folder / "chat_template.jinja"
    if single.exists():
        out["default"] = single.read_text("utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        out[path.stem] = path.read_text("utf-8")
    return out
