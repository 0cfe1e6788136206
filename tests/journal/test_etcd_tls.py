"""A real etcd that speaks TLS and wants everybody's certificate: who is let in, and what is said to who is not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.journal.etcd_members import Members, start_members
from tests.runtime.certificates import Authority, etcd_variables

from outlast.config import TlsFiles
from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal import Journal, Unreachable, _etcd, _renewed, access_of, check_reachable
from outlast.journal._etcd import Etcd
from outlast.journal._etcd_tls import CertificateRefused, EtcdTls
from outlast.runtime.host.coordinator_finder import CoordinatorFinder

pytestmark = pytest.mark.process
SECRET = b"s" * 32


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Members]:
    with start_members(tmp_path_factory.mktemp("etcd"), authority.files("etcd", "IP:127.0.0.1")) as found:
        yield found


def test_a_record_is_kept_by_tls_with_certificates_at_both_ends(
    tmp_path: Path, members: Members, authority: Authority
) -> None:
    mine = etcd_variables(authority.files("mine", "DNS:any.where"))
    check_reachable(members.record, mine)
    with Journal.create(tmp_path / "journal") as journal:
        shared = journal.sharing(access_of(members.record, mine), "run", SECRET, 30.0)
        assert shared.look(5.0).claim is None
        shared.close()
    for index in (0, 1):
        members.kill(index)
        members.start(index)  # what was open is lost, and made anew
    members.ready()
    check_reachable(members.record, mine)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("none", "etcd wants a certificate of this host"),
        ("expired", "etcd refuses this host's certificate"),
        ("stranger", "etcd refuses this host's certificate"),
    ],
)
def test_who_has_no_right_certificate_is_told_so(
    kind: str, says: str, members: Members, authority: Authority, tmp_path: Path
) -> None:
    ca = authority.files().ca
    files = {
        "none": lambda: TlsFiles("", "", ca),
        "expired": lambda: authority.files("expired", days=-1),
        "stranger": lambda: Authority(tmp_path / "others").files()._replace(ca=ca),
    }[kind]()
    with pytest.raises(EnvironmentFault, match=says) as refused:
        check_reachable(members.record, etcd_variables(files), 3.0)
    assert "OUTLAST_ETCD_CERT" in refused.value.remedy
    finder = CoordinatorFinder(members.record, SECRET, etcd_variables(files))
    with pytest.raises(OSError, match=says):
        finder.now()
    finder.close()


def test_a_refusal_is_told_also_where_the_time_is_up_in_a_later_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the last try has seldom the time to be refused once more."""
    etcd, now_s = Etcd(access_of("etcd://127.0.0.1:1", {})), [0.0]
    failures = [CertificateRefused("it wants another certificate"), TimeoutError("timed out")]

    def once(*_: object) -> None:
        now_s[0] += 1.0
        raise failures.pop(0)

    monkeypatch.setattr(_etcd, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(etcd, "_once", once)
    with pytest.raises(Unreachable, match=r"it wants another certificate, and then 127\.0\.0\.1:1: timed out") as told:
        etcd.range("/outlast/", 1.5)
    assert told.value.refused == "it wants another certificate"


def test_members_of_another_authority_are_told_nothing(members: Members, authority: Authority, tmp_path: Path) -> None:
    others = Authority(tmp_path / "others").files()
    with pytest.raises(EnvironmentFault, match="shows a certificate that is not trusted"):
        check_reachable(members.record, etcd_variables(others))


def test_renewed_files_that_cannot_be_used_are_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not at once, for they may be half renewed: the old ones would hold in silence until they have expired."""
    files = Authority(tmp_path / "own").files()
    tls = EtcdTls({"CA": files.ca, "CERT": files.cert, "KEY": files.key})
    before = tls.context()
    Path(files.key).write_text("no key")
    for _ in range(5):
        tls.context()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_renewed, "_APART_S", 0.0)
    for _ in range(5):
        assert tls.context() is before
    assert capsys.readouterr().err.count("renewed files are not taken") == 1


def test_renewed_files_are_read_for_the_next_connection(members: Members, authority: Authority, tmp_path: Path) -> None:
    """Not before they are whole: what was there holds until then."""
    old, new = authority.files("expired", days=-1), authority.files("new")
    mine = TlsFiles(*(str(tmp_path / part) for part in ("cert", "key", "ca")))

    def put(files: TlsFiles, *parts: str) -> None:
        for part in parts:
            shutil.copyfile(getattr(files, part), tmp_path / part)

    put(old, "cert", "key", "ca")
    etcd = Etcd(access_of(members.record, etcd_variables(mine)))
    put(new, "cert")  # without its key
    with pytest.raises(Unreachable, match="refuses this host's certificate"):
        etcd.range("/outlast/", 3.0)
    put(new, "key")
    etcd.range("/outlast/", 10.0)
    etcd.close()


def test_files_that_cannot_be_used_are_refused(authority: Authority, tmp_path: Path) -> None:
    files = authority.files()
    locked = tmp_path / "locked.key"
    authority._openssl("pkey", "-in", files.key, "-aes128", "-passout", "pass:x", "-out", str(locked))
    told = etcd_variables(files)
    with pytest.raises(ConfigError, match="has a passphrase"):
        access_of("etcds://a:1", told | {"OUTLAST_ETCD_KEY": str(locked)})
    with pytest.raises(ConfigError, match="a key for etcd, and no certificate"):
        access_of("etcds://a:1", told | {"OUTLAST_ETCD_CERT": ""})
