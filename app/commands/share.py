"""`ingle share`: let the user's other machines use the models of this one."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from app.client.pinned_tls import fingerprint_of
from app.errors import InvalidSetting
from app.process.listening import bracketed
from app.settings.api_keys import make_shared_key, revoke_shared_key
from app.settings.boxes import Box
from app.settings.config_file import remove_setting, write_setting
from app.settings.settings import DEFAULT_TLS_PORT, Settings, load_settings
from app.whole_file import write_whole
from engine.private_folder import private_folder

EXAMPLES = """\b
Examples:
  ingle share                              on the machine with the GPU
  ingle share --address gpu-box.lan
  ingle share --off
"""

_VALID_DAYS = 20 * 365
_ANY_REMOTE = ("192.0.2.1", 9)  # an address for documentation (RFC 5737); no packet is sent to it


@click.command(epilog=EXAMPLES)
@click.option(
    "--address",
    metavar="HOST",
    help="Name or address by which the other machines reach this one. Default: its address in the local network.",
)
@click.option("--port", type=int, help=f"Port for the other machines. Default: {DEFAULT_TLS_PORT}.")
@click.option("--off", is_flag=True, help="Stop sharing, and revoke the key.")
def share(address: str | None, port: int | None, off: bool) -> None:
    """Share the models of this machine with your other machines.

    Prints one line with the address, a key, and the fingerprint of this machine's certificate. On the other machine,
    ingle box add NAME LINE stores it. The line is a secret: it gives access to all models of this machine, until ingle
    share --off revokes the key.

    Sets tls_port in config.toml, so that ingle serve also serves HTTPS to other machines.
    """
    settings = load_settings(tls_port=port)
    if off:
        _stop(settings)
        return
    chosen = settings.tls_port or DEFAULT_TLS_PORT
    fingerprint = _certificate_fingerprint(settings)
    host = address or _own_address()
    url = f"https://{bracketed(host)}:{chosen}"
    line = Box("box", url, fingerprint, make_shared_key(settings)).line
    Box.parse("box", line)  # raises for an invalid address
    path = write_setting("tls_port", str(chosen))
    click.echo("On the other machine, run ingle box add NAME LINE with this line. It contains a key:\n", err=True)
    click.echo(line)
    click.echo(
        f"\nStart the server of this machine with ingle serve; if it runs, restart it. tls_port is {chosen} in {path}.",
        err=True,
    )


def _stop(settings: Settings) -> None:
    was_shared = revoke_shared_key(settings)
    remove_setting("tls_port")
    click.echo("The key is revoked." if was_shared else "This machine is not shared.", err=True)


def _certificate_fingerprint(settings: Settings) -> str:
    """Return the fingerprint of the certificate, which is made if there is none. Raises InvalidSetting."""
    if settings.origins["tls_certificate"] == "default" and not settings.tls_certificate.exists():
        _make_certificate(settings.tls_certificate, settings.tls_key)
    try:
        text = settings.tls_certificate.read_text(encoding="ascii")
        first = text[: text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :]))
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not a certificate in PEM format"
        raise InvalidSetting(
            f"{settings.tls_certificate}: {reason}", "Remove it, or correct tls_certificate."
        ) from None


def _make_certificate(certificate: Path, private_key: Path) -> None:
    """Write a self-signed certificate and its key to files that only this user can read. Raises OSError."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "inglenook")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_VALID_DAYS))
        .sign(key, SHA256())
    )
    private_folder(certificate.parent)
    write_whole(private_key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    write_whole(certificate, made.public_bytes(Encoding.PEM), 0o600)


def _own_address() -> str:
    """Return the address of this machine in the network of its default route, or its name without one."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANY_REMOTE)
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
