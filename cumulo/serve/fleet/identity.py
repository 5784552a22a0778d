"""Which model a server has, as a fingerprint: two servers with the same one draw the same tokens."""

import hashlib
from pathlib import Path

from cumulo import __version__
from cumulo.base.files import sampled_digest
from cumulo.models.files.hub import resolve
from cumulo.serve.fleet.wire import FleetIdentity
from cumulo.serve.service import Service


def fleet_identity(service: Service) -> FleetIdentity:
    """Reads the model's files; call it in a thread, once the engine has said what it loaded."""
    info, text = service.info, service.text
    tokenizer = hashlib.sha256()
    for token in range(text.tokenizer.vocab_size):
        tokenizer.update(text.tokenizer.token_bytes(token) + b"\n")
    engine = service.options.engine
    whole = hashlib.sha256(tokenizer.digest())
    whole.update(repr((info.vocab_size, info.hidden_size, info.eos_ids, info.generation_defaults)).encode())
    whole.update(repr((engine.dtype, engine.weights, engine.kv_dtype)).encode())
    for path in _files(resolve(service.options.model).path):
        whole.update(path.name.encode() + sampled_digest(path))
    if service.options.chat_template is not None:
        whole.update(service.options.chat_template.read_bytes())
    return FleetIdentity(
        version=__version__,
        model=service.model_name,
        fingerprint=whole.hexdigest()[:16],
        tokenizer=tokenizer.hexdigest()[:16],
        block_size=info.block_size,
        max_context=info.max_context,
        max_running=info.max_running,
    )


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file())
