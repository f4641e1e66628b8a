"""Certificates made on the spot: an authority, and what it signs."""

from __future__ import annotations

import ipaddress
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

VALID_FOR = timedelta(days=3650)
_SKEW = timedelta(hours=1)
"""Largest delay of a machine's clock with which a new certificate is valid there."""


_PEM = serialization.Encoding.PEM


class Authority:
    """An authority that signs certificates for this machine; a client trusts its `certificate`."""

    def __init__(self, name: str) -> None:
        self._name = _named(name)
        self._key = _new_key()
        now = datetime.now(timezone.utc)
        own = _builder(self._name, self._name, self._key, now - _SKEW, now + VALID_FOR)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = _pem(own.sign(self._key, hashes.SHA256()))

    def signed(self, name: str, valid_for: timedelta = VALID_FOR) -> bytes:
        """Return a new key and a certificate of this machine as PEM, valid since an hour ago.

        With a negative `valid_for`, it has expired.
        """
        now = datetime.now(timezone.utc)
        key = _new_key()
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        since = now - _SKEW + min(valid_for, timedelta(0))
        signed = _builder(_named(name), self._name, key, since, now + valid_for)
        signed = signed.add_extension(x509.SubjectAlternativeName(names), critical=False)
        form = (_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return key.private_bytes(*form) + _pem(signed.sign(self._key, hashes.SHA256()))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: rsa.RSAPrivateKey, since: datetime, until: datetime
) -> x509.CertificateBuilder:
    number = x509.random_serial_number()
    return x509.CertificateBuilder(issuer, subject, key.public_key(), number, since, until)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(_PEM)
