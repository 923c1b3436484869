"""Tokenizers: folders against transformers, GGUF against its source, streams against whole decoding."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aengine.errors import InvalidRequest, ModelLoadError
from aengine.models import tokenizer as tokenizer_module
from aengine.models.detokenize import byte_alphabet
from aengine.models.gguf import GGUFFile
from aengine.models.gguf_tokenizer import _QWEN2, build_tokenizer
from aengine.models.loader import load_tokenizer
from aengine.models.tokenizer import tokenizer_from_folder, tokenizer_from_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1984, isn't it? We'll see 12345 foxes.",
    "def main(args):\n\treturn [x**2 for x in range(10)]  # squares\n\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Élan, naïve café.",
    "日本語のテキストと、한국어 텍스트, 以及中文文本。 Привет, мир! 🎉🎊👩‍👩‍👧",
    "  spaces   and\ttabs \r\n and newlines\n\n\nend ",
] * 3
TEXTS = [
    *CORPUS[:5],
    "",
    " ",
    "a",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x <s> y </s>",
    "unseen: ♞ ₿ \u200d",
    "e\u0301 \u00e9",
    "<0x41> ▁ x",
]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def byte_level() -> Backend:
    """A byte-level BPE as Qwen's: NFC aside, its pre-tokenizer, 600 tokens, three special ones and a visible one."""
    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIALS, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def save_folder(folder, backend, **settings):
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def folder(tmp_path, byte_level):
    out = save_folder(tmp_path / "hf", byte_level, bos_token="<|endoftext|>")
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


def test_folder_equals_transformers(folder):
    ours, theirs = tokenizer_from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert ours.special_ids == frozenset(theirs.all_special_ids) | {ours.encode("<|im_start|>")[0]}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_the_tokenizer_file_decides_on_bos_and_eos(tmp_path, byte_level, bos, eos):
    backend = Backend.from_str(byte_level.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", 1)]
    )
    out = save_folder(tmp_path / "hf", backend, bos_token="<|endoftext|>", add_bos_token=bos, add_eos_token=eos)
    ours, theirs = tokenizer_from_folder(out), PreTrainedTokenizerFast.from_pretrained(out)
    assert ours.encode("fox") == theirs.encode("fox") == [1, *ours.encode("fox", add_special_tokens=False)]


def test_end_ids_are_the_union_of_configuration_and_tokenizer(folder):
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    assert tokenizer_from_folder(folder).eos_ids == (0, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    assert tokenizer_from_folder(folder).eos_ids == (1, 0, 2)


def test_special_tokens_may_be_objects_or_stand_in_the_map(tmp_path, byte_level):
    out = save_folder(tmp_path / "hf", byte_level, bos_token={"content": "<|im_start|>", "lstrip": False})
    (out / "special_tokens_map.json").write_text('{"unk_token": "<|endoftext|>", "bos_token": "x"}')
    ours = tokenizer_from_folder(out)
    assert ours.bos_id == 1
    assert ours.render_chat([{"role": "user", "content": ""}], chat_template="{{ bos_token + unk_token }}") == (
        "<|im_start|><|endoftext|>"
    )


def test_a_model_without_template_says_so(tmp_path, byte_level):
    ours = tokenizer_from_folder(save_folder(tmp_path / "hf", byte_level))
    assert not ours.has_chat_template
    assert ours.chat_template is None
    assert ours.render_chat([{"role": "user", "content": "hi"}]) == "User: hi\n\nAssistant:"


def test_named_templates(tmp_path, byte_level):
    named = [{"name": "tool_use", "template": "T{{ tools | length }}"}, {"name": "rag", "template": "R"}]
    out = save_folder(tmp_path / "hf", byte_level, chat_template=named)
    ours, chat = tokenizer_from_folder(out), [{"role": "user", "content": "hi"}]
    assert ours.has_chat_template
    assert ours.render_chat(chat, tools=[{"a": 1}]) == "T1"
    assert ours.render_chat(chat, chat_template="rag") == "R"
    with pytest.raises(InvalidRequest, match="name one of: rag, tool_use"):
        ours.render_chat(chat)


def test_broken_folders_are_typed_errors(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelLoadError, match=r"found tokenizer\.model"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read as a tokenizer"):
        tokenizer_from_folder(tmp_path)


def test_lone_surrogates_are_refused(folder):
    with pytest.raises(InvalidRequest, match="cannot be tokenised") as caught:
        tokenizer_from_folder(folder).encode("a\ud800b")
    assert caught.value.param == "prompt"


# --- GGUF -------------------------------------------------------------------------------------------------------------


def write_byte_level(builder, backend, pre="qwen2", template=TEMPLATE, **flags):
    vocab = sorted(backend.get_vocab(), key=backend.token_to_id)
    merges = json.loads(backend.to_str())["model"]["merges"]
    writer = builder.writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in SPECIALS else 4 if token == "<think>" else 1 for token in vocab])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    if template:
        writer.add_chat_template(template)
    for name, value in flags.items():
        getattr(writer, name)(value)
    return builder.write()


def test_byte_level_gguf_equals_its_source(gguf_builder, byte_level, tmp_path):
    ours = tokenizer_from_gguf(GGUFFile(write_byte_level(gguf_builder(), byte_level)), tmp_path)
    for text in TEXTS:
        wanted = byte_level.encode(text).ids
        if text != "e\u0301 \u00e9":  # qwen2 composes characters first, the source does not
            assert ours.encode(text) == wanted
        assert ours.decode(wanted) == byte_level.decode(wanted)
    assert ours.encode("e\u0301") == byte_level.encode("\u00e9").ids
    assert ours.vocab_size == byte_level.get_vocab_size()
    assert ours.special_ids == {0, 1, 2}
    assert ours.eos_ids == (0, 2)  # the template ends turns with <|im_end|>
    assert ours.encode("<think>") == [byte_level.token_to_id("<think>")]
    assert ours.decode(ours.encode("<think><|im_end|>")) == "<think>"


def test_bos_flag_of_gguf(gguf_builder, byte_level, tmp_path):
    path = write_byte_level(gguf_builder("a.gguf"), byte_level, add_add_bos_token=True, add_add_eos_token=True)
    ours = tokenizer_from_gguf(GGUFFile(path), tmp_path)
    assert ours.encode("fox") == [0, *ours.encode("fox", add_special_tokens=False), 0]
    path = write_byte_level(gguf_builder("b.gguf"), byte_level, pre="llama-bpe", template="")
    ours = tokenizer_from_gguf(GGUFFile(path), tmp_path)
    assert ours.encode("fox")[0] == 0  # Llama 3 begins texts even when the file does not say so
    assert ours.render_chat([{"role": "user", "content": "x"}]).startswith("<|endoftext|>User: x")


def test_digits_are_split_as_the_pre_tokenizer_says(gguf_builder, byte_level):
    vocab = byte_level.get_vocab()
    pieces = {}
    for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2"):
        path = write_byte_level(gguf_builder(f"{pre}.gguf"), byte_level, pre=pre)
        splitter = build_tokenizer(GGUFFile(path)).pre_tokenizer
        pieces[pre] = [piece for piece, _ in splitter.pre_tokenize_str("ab 12345")]
    assert vocab
    assert pieces["smollm"] == ["ab", "Ġ", "1", "2", "3", "4", "5"]
    assert pieces["qwen2"] == ["ab", "Ġ", "1", "2", "3", "4", "5"]
    assert pieces["llama-bpe"] == ["ab", "Ġ", "123", "45"]
    assert pieces["gpt-2"] == ["ab", "Ġ12345"]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def spm(request):
    """A SentencePiece BPE with byte fallback, as Llama 2 (space prefix) or Gemma (none) have."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.split("\n") if line.strip()),
        model_writer=out, vocab_size=560, model_type="bpe", byte_fallback=True, add_dummy_prefix=request.param,
        remove_extra_whitespaces=False, normalization_rule_name="identity", split_digits=True, character_coverage=0.98,
        allow_whitespace_only_pieces=True, user_defined_symbols=["\n\n", "<start>"], minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()), request.param


def write_spm(builder, processor, prefix):
    writer, count = builder.writer, processor.get_piece_size()
    kinds = [
        2 if processor.is_unknown(index)
        else 3 if processor.is_control(index)
        else 6 if processor.is_byte(index)
        else 4 if processor.id_to_piece(index) in ("\n\n", "<start>")
        else 1
        for index in range(count)
    ]  # fmt: skip
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(index) for index in range(count)])
    writer.add_token_scores([processor.get_score(index) for index in range(count)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    return builder.write()


def test_sentencepiece_gguf_equals_sentencepiece(gguf_builder, spm, tmp_path):
    processor, prefix = spm
    ours = tokenizer_from_gguf(GGUFFile(write_spm(gguf_builder(), processor, prefix)), tmp_path)
    plain = [
        text
        for text in TEXTS
        if not {"<s>", "\n\n", "\u2581"} & {part for part in ("<s>", "\n\n", "▁") if part in text}
    ]
    assert len(plain) >= 8
    for text in plain:
        assert ours.encode(text, add_special_tokens=False) == processor.encode(text), text
        assert ours.encode(text) == [1, *processor.encode(text)]
        assert ours.decode(ours.encode(text)) == processor.decode(processor.encode(text))
    assert (ours.bos_id, ours.eos_ids, ours.special_ids) == (1, (2,), {1, 2})
    assert ours.encode("a<start>", add_special_tokens=False)[-1] == processor.piece_to_id("<start>")
    assert not ours.has_chat_template


def test_gguf_tokenizer_is_built_once_and_cached_beside_the_file(gguf_builder, byte_level, gguf_files, monkeypatch):
    files = gguf_files(write_byte_level(gguf_builder(), byte_level))
    first = load_tokenizer(files)
    (cached,) = files.path.parent.glob("model.*.tokenizer.json")
    monkeypatch.setattr(tokenizer_module, "build_tokenizer", lambda file: pytest.fail("built a second time"))
    again = load_tokenizer(files)
    assert [again.encode(text) for text in TEXTS] == [first.encode(text) for text in TEXTS]
    assert (again.special_ids, again.eos_ids, again.chat_template) == (first.special_ids, first.eos_ids, TEMPLATE)
    assert cached.stat().st_mode & 0o777 == 0o644
    monkeypatch.undo()
    cached.write_text("{broken")  # an interrupted copy, say
    assert load_tokenizer(files).encode("fox") == first.encode("fox")
    assert json.loads(cached.read_text())["version"]


def test_cache_follows_the_content(gguf_builder, byte_level, gguf_files):
    files = gguf_files(write_byte_level(gguf_builder(), byte_level))
    load_tokenizer(files)
    write_byte_level(gguf_builder(), byte_level, template="{{ 'other' }}")
    assert load_tokenizer(files).chat_template == "{{ 'other' }}"
    assert len(list(files.path.parent.glob("model.*.tokenizer.json"))) == 2


def test_read_only_folders_are_cached_under_home(gguf_builder, byte_level, gguf_files, monkeypatch):
    files = gguf_files(write_byte_level(gguf_builder(), byte_level))
    real = tokenizer_module.tempfile.mkstemp

    def refuse(*, dir, prefix):
        if dir == files.path.parent:
            raise PermissionError(13, "read-only")
        return real(dir=dir, prefix=prefix)

    monkeypatch.setattr(tokenizer_module.tempfile, "mkstemp", refuse)
    load_tokenizer(files)
    assert not list(files.path.parent.glob("*.tokenizer.json"))
    assert len(list((files.home / "tokenizers").glob("model.*.tokenizer.json"))) == 1
    monkeypatch.setattr(tokenizer_module, "build_tokenizer", lambda file: pytest.fail("built a second time"))
    load_tokenizer(files)


def test_gguf_refusals(gguf_builder, byte_level, tmp_path):
    path = write_byte_level(gguf_builder("a.gguf"), byte_level, pre="mystery")
    with pytest.raises(ModelLoadError, match="pre-tokenizer 'mystery' is not supported; supported are default, gpt-2"):
        tokenizer_from_gguf(GGUFFile(path), tmp_path)
    builder = gguf_builder("b.gguf")
    builder.writer.add_tokenizer_model("bert")
    with pytest.raises(ModelLoadError, match="tokenizer 'bert' is not supported"):
        tokenizer_from_gguf(GGUFFile(builder.write()), tmp_path)
    builder = gguf_builder("c.gguf")
    builder.writer.add_tokenizer_model("llama")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.tokens is missing"):
        tokenizer_from_gguf(GGUFFile(builder.write()), tmp_path)


# --- streams and bytes ------------------------------------------------------------------------------------------------


def pieces(tokenizer, ids, skip):
    stream = tokenizer.stream(skip_special_tokens=skip)
    out = [stream.step(token) for token in ids]
    assert "" not in out
    return [text for text in out if text is not None], stream.flush()


@pytest.fixture(scope="module")
def byte_tokenizer(byte_level, tmp_path_factory):
    return tokenizer_from_folder(save_folder(tmp_path_factory.mktemp("stream") / "hf", byte_level))


@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_byte_stream_equals_decoding_all_at_once(byte_tokenizer, skip, data):
    ids = data.draw(st.lists(st.integers(0, byte_tokenizer.vocab_size + 2), max_size=30))
    texts, rest = pieces(byte_tokenizer, ids, skip)
    assert "".join(texts) + rest == byte_tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_byte_stream_emits_whole_characters_only(byte_tokenizer, text):
    texts, rest = pieces(byte_tokenizer, byte_tokenizer.encode(text, add_special_tokens=False), False)
    assert "".join(texts) == text
    assert rest == ""
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in texts)


@pytest.fixture(scope="module")
def spm_tokenizer(spm, tmp_path_factory):
    import gguf

    processor, prefix = spm
    path = tmp_path_factory.mktemp("spm") / "model.gguf"

    class Builder:
        writer = gguf.GGUFWriter(path, "llama")

        def write(self):
            self.writer.write_header_to_file()
            self.writer.write_kv_data_to_file()
            self.writer.write_tensors_to_file()
            self.writer.close()
            return path

    return tokenizer_from_gguf(GGUFFile(write_spm(Builder(), processor, prefix)), path.parent)


@given(text=st.text(st.characters(exclude_characters="\u2581\ufffd", exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_stream_equals_decoding_all_at_once(spm_tokenizer, text):
    ids = spm_tokenizer.encode(text, add_special_tokens=False)
    texts, rest = pieces(spm_tokenizer, ids, True)
    assert "".join(texts) + rest == spm_tokenizer.decode(ids)
    assert rest == ""
    assert not any("\ufffd" in piece for piece in texts)


def is_ascii_byte(tokenizer, token):
    """Such bytes vanish from whole decoding when one beside them is not UTF-8; a stream has given them out before."""
    return tokenizer._backend.id_to_token(token).startswith("<0x") and tokenizer.token_bytes(token).isascii()


@pytest.fixture(scope="module")
def spm_ids(spm_tokenizer):
    return [token for token in range(spm_tokenizer.vocab_size) if not is_ascii_byte(spm_tokenizer, token)]


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_sentencepiece_stream_survives_any_ids(spm_tokenizer, spm_ids, data):
    """Bytes that are not UTF-8 come out as replacements; the text around them is not lost, and nothing is held long."""
    ids = data.draw(st.lists(st.sampled_from(spm_ids), max_size=30))
    texts, rest = pieces(spm_tokenizer, ids, True)
    streamed, whole = "".join(texts) + rest, spm_tokenizer.decode(ids)
    assert [c for c in streamed if c.isascii() and c.isalpha()] == [c for c in whole if c.isascii() and c.isalpha()]


def test_nothing_is_held_for_ever(spm_tokenizer):
    stream = spm_tokenizer.stream()
    byte = spm_tokenizer.encode("♞", add_special_tokens=False)[-1]
    held = [stream.step(byte) for _ in range(50)]
    assert sum(text is not None for text in held) >= 5


def test_text_that_stands_alone_is_looked_up_and_single_bytes_are_not(byte_tokenizer, spm_tokenizer):
    """Else a token costs two runs of the decoder, some 20 µs."""
    text = "the quick brown fox ♞ ends"
    for tokenizer in (byte_tokenizer, spm_tokenizer):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for _ in range(2):
            texts, rest = pieces(tokenizer, ids, True)
            assert "".join(texts) + rest == tokenizer.decode(ids)
        known = tokenizer._token_bytes.whole(tokenizer.special_ids)
        partial = {token for token in ids if "\ufffd" in tokenizer.token_text(token)}
        assert partial
        assert not partial & known.keys()
        assert len(set(ids[1:]) - partial - known.keys()) <= 1  # a token behind a character in pieces may be new


@pytest.mark.parametrize("skip", [True, False])
def test_a_stream_s_table_says_what_step_would(byte_tokenizer, spm_tokenizer, skip):
    """Text that ends tokens in the midst of characters, and special tokens, for streams that skip them or not."""
    for tokenizer, looked_up in ((byte_tokenizer, 0.5), (spm_tokenizer, 0.0)):
        special = sorted(tokenizer.special_ids)[:1]
        ids = tokenizer.encode("a fox ♞ and 日本 a fox", add_special_tokens=False) * 3
        ids = ids[:7] + special + ids[7:] + special
        for _ in range(2):  # the second stream finds the table full
            stepped, table = tokenizer.stream(skip_special_tokens=skip), {}
            mixed, found, texts = tokenizer.stream(skip_special_tokens=skip), 0, []
            for token in ids:
                expected = stepped.step(token) or ""
                if (text := table.get(token)) is None:
                    text, table = mixed.step(token) or "", mixed.table
                else:
                    found += 1
                assert text == expected
                texts.append(text)
            assert "".join(texts) + mixed.flush() == tokenizer.decode(ids, skip_special_tokens=skip)
        assert found >= looked_up * len(ids)


def test_token_bytes_join_to_the_text(byte_tokenizer, spm_tokenizer):
    for tokenizer in (byte_tokenizer, spm_tokenizer):
        for text in [text for text in CORPUS[:5] if "\n\n" not in text]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(tokenizer.token_bytes(token) for token in ids)
            assert joined.decode() in (text, " " + text)
        assert tokenizer.token_bytes(10**6) == b""
    ids = byte_tokenizer.encode("🎊", add_special_tokens=False)
    assert b"".join(map(byte_tokenizer.token_bytes, ids)) == "🎊".encode()
    assert byte_tokenizer.token_text(ids[0]) == "\ufffd"
    assert byte_tokenizer.token_text(byte_tokenizer.encode(" fox")[-1]).strip() in "fox"


def test_byte_alphabet_is_the_library_s():
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    assert np.all([alphabet[chr(byte)] == byte for byte in range(0x21, 0x7F)])
