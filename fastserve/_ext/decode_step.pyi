from typing_extensions import Buffer

def rms_norm(rows: Buffer, weight: Buffer, out: Buffer, eps: float) -> None: ...
def attend(
    query: Buffer,
    key: Buffer,
    value: Buffer,
    keys: Buffer,
    values: Buffer,
    positions: Buffer,
    out: Buffer,
    *,
    scale: float,
    window: int = ...,
    threads: int = 1,
) -> None: ...
