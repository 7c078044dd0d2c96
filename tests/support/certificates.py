"""A certificate authority for tests, and its certificates."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from parti.testing import TlsFiles


@dataclass(frozen=True)
class Certificates:
    """A small certificate authority made with the openssl tool."""

    folder: Path

    def make(self) -> None:
        self._run("req", "-x509", *self._new("ca"), "-days", "2", "-subj", "/CN=test ca")
        for name, subject in (("server", "127.0.0.1"), ("client", "client")):
            extension = self.folder / f"{name}.ext"
            extension.write_text("subjectAltName=IP:127.0.0.1,DNS:nats.test\n" if name == "server" else "")
            self._run("req", *self._new(name, key_only=True), "-subj", f"/CN={subject}")
            signing = ("-CA", self.path("ca.crt"), "-CAkey", self.path("ca.key"), "-CAcreateserial")
            self._run(
                *("x509", "-req", "-in", self.path(f"{name}.csr"), *signing, "-days", "2"),
                *("-out", self.path(f"{name}.crt"), "-extfile", str(extension)),
            )
        self._run("req", "-x509", *self._new("stranger"), "-days", "2", "-subj", "/CN=stranger")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def server(self, *, mutual: bool = False) -> TlsFiles:
        ca = self.folder / "ca.crt" if mutual else None
        return TlsFiles(self.folder / "server.crt", self.folder / "server.key", ca)

    def _new(self, name: str, *, key_only: bool = False) -> list[str]:
        out = ("-out", self.path(f"{name}.csr" if key_only else f"{name}.crt"))
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        return [*curve, "-keyout", self.path(f"{name}.key"), *out]

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
