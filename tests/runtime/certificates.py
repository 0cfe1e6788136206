"""Certificates for tests, made by openssl: a run's own, and each kind that a run refuses."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from outlast.config import TlsFiles
from outlast.runtime.transport.tls import Tls

__all__ = ["Authority", "by_tls", "etcd_variables", "nobody_tells", "variables"]

NAME = "outlast.test"


class Authority:
    """Signs certificates in a folder of its own, by this name. Skips the test where there is no openssl."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl here, which makes this test's certificates")
        self.folder = folder
        folder.mkdir(parents=True)
        self._openssl(
            "req", "-x509", *_NEW, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", f"/CN={name}"
        )

    def _openssl(self, *words: str) -> None:
        done = subprocess.run(["openssl", *words], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @functools.cache  # noqa: B019 - an authority lives as long as its test
    def files(
        self, kind: str = "good", names: str = f"DNS:{NAME},IP:127.0.0.1", days: int = 2, use: str = "", name: str = ""
    ) -> TlsFiles:
        """A host's own, for these names."""
        place = f"{kind}.{{}}".format
        self._openssl("req", *_NEW, "-keyout", place("key"), "-out", place("csr"), "-subj", f"/CN={kind}")
        (self.folder / place("ext")).write_text(
            f"subjectAltName={names}\n" + (f"extendedKeyUsage={use}\n" if use else "")
        )
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days)]
        self._openssl("x509", "-req", "-in", place("csr"), "-out", place("pem"), "-extfile", place("ext"), *signing)
        (self.folder / place("key")).chmod(0o600)
        return TlsFiles(*(str(self.folder / file) for file in (place("pem"), place("key"), "ca.pem")), name)

    def revoke(self, *revoked: TlsFiles, between: tuple[str, str] | None = None) -> None:
        """Sign a list of all that were revoked so far, these too, and put it beside the authority in `ca.pem`.
        `between`: when it is valid, as YYYYMMDDHHMMSSZ."""
        own = ["-config", "lists.cnf", "-keyfile", "ca.key", "-cert", "signer.pem"]
        if not (self.folder / "lists.cnf").exists():
            (self.folder / "lists.cnf").write_text(_LISTS)
            (self.folder / "revoked.txt").touch()
            (self.folder / "signer.pem").write_text((self.folder / "ca.pem").read_text())
        for files in revoked:
            self._openssl("ca", *own, "-revoke", files.cert)
        valid = ["-crl_lastupdate", between[0], "-crl_nextupdate", between[1]] if between else ["-crldays", "1"]
        self._openssl("ca", *own, "-gencrl", "-out", "list.pem", *valid)
        whole = (self.folder / "signer.pem").read_text() + (self.folder / "list.pem").read_text()
        (self.folder / "ca.new").write_text(whole)
        (self.folder / "ca.new").replace(self.folder / "ca.pem")

    def tls(self, name: str = "") -> Tls:
        return Tls(self.files()._replace(name=name))

    def wrong(self, kind: str) -> Tls:
        """`expired`, `name`, `use`, or (of another authority) `authority`."""
        if kind == "authority":
            other = Authority(self.folder / "other").files()
            return Tls(other._replace(ca=str(self.folder / "ca.pem")))
        given = {"expired": {"days": -1}, "name": {"names": "DNS:else.where"}, "use": {"use": "emailProtection"}}
        return Tls(self.files(kind, **given[kind]))  # type: ignore[arg-type]


_LISTS = "[ca]\ndefault_ca = own\n[own]\ndatabase = revoked.txt\ndefault_md = sha256\n"
_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def variables(files: TlsFiles) -> dict[str, str]:
    """What says so to a host that joins, and to who asks something of the run."""
    return {f"OUTLAST_TLS_{part.upper()}": value for part, value in files._asdict().items() if value}


def etcd_variables(files: TlsFiles) -> dict[str, str]:
    """What says to a host which certificates there are for etcd."""
    return {f"OUTLAST_ETCD_{part.upper()}": getattr(files, part) for part in ("ca", "cert", "key")}


def by_tls(files: TlsFiles) -> list[str]:
    """Options of an etcd that takes only who shows a certificate of the authority's, as client and as member."""
    options = {"cert-file": files.cert, "key-file": files.key, "trusted-ca-file": files.ca}
    pairs = [(part + name, value) for part in ("", "peer-") for name, value in options.items()]
    return [
        "--client-cert-auth",
        "--peer-client-cert-auth",
        *(word for n, value in pairs for word in (f"--{n}", value)),
    ]


def nobody_tells(authority: Authority, secret: str, *places: Path) -> None:
    """Neither the secret nor a key is in anything that was written in these folders and files."""
    secrets = [secret.encode()]
    for key in authority.folder.rglob("*.key"):
        secrets += [line.encode() for line in key.read_text().splitlines() if not line.startswith("-----")]
    for path in (each for place in places for each in (place, *place.rglob("*")) if each.is_file()):
        written = path.read_bytes()
        assert not any(told in written for told in secrets), path
