"""TLS to a server whose certificate is known by its fingerprint. No certificate authority is involved."""

import hashlib
import hmac
import ssl


class WrongCertificate(ssl.SSLCertVerificationError):
    """The server has another certificate than the expected one."""


def wrong_certificate(error: BaseException | None) -> WrongCertificate | None:
    """Return the WrongCertificate that caused another error, or None."""
    while error is not None and not isinstance(error, WrongCertificate):
        error = error.__cause__ or error.__context__
    return error


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate in DER format, in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def pinned_context(fingerprint: str) -> ssl.SSLContext:
    """Return a context for clients that accept only the certificate with this fingerprint.

    The certificate is checked at the end of the handshake, before the client sends anything. A handshake with another
    certificate raises WrongCertificate. The context is for asyncio: it does not check blocking sockets, so it cannot
    wrap them.
    """

    class PinnedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            found = fingerprint_of(self.getpeercert(binary_form=True) or b"")
            if not hmac.compare_digest(found, fingerprint):
                problem = f"its certificate has the fingerprint {found}, and {fingerprint} is expected"
                raise WrongCertificate(ssl.SSL_ERROR_SSL, problem)

    context = _AsyncOnly(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.sslobject_class = PinnedObject
    return context


class _AsyncOnly(ssl.SSLContext):
    def wrap_socket(self, *arguments: object, **options: object) -> ssl.SSLSocket:
        raise NotImplementedError("the certificate would not be checked")
