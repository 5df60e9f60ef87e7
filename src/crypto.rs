//! Hashing, signing, sealing and random bytes: the only room that touches a cipher. Sealed data is bound to a context
//! (tenant, table, row), so that a ciphertext moved elsewhere does not open.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::{constant_time, digest, hmac, rand};
use secrecy::{ExposeSecret, SecretString};

const VERSION: u8 = 1;
const KEY_ID_LEN: usize = 4;
/// Names the key of a ciphertext or a tag, and reveals nothing about it.
pub type KeyId = [u8; KEY_ID_LEN];
const HEADER_LEN: usize = 1 + KEY_ID_LEN + NONCE_LEN;
const SIGNATURE_LEN: usize = 16;
pub const MAC_LEN: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("sealed data does not open: another key, another context, or damage")]
pub struct OpenError;

/// A tag that stays in the database for good, and the id of the key that made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mac {
    pub key_id: KeyId,
    pub tag: [u8; MAC_LEN],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadMac {
    #[error("made with a key that is not in THROUGHLINE_SECRET_KEY")]
    UnknownKey,
    #[error("not made by a key of this service")]
    Wrong,
}

/// The keys of `SECRET_KEY`. The first seals and signs; all open and verify, so a key is rotated by
/// putting a new one in front.
pub struct Keyring {
    keys: Vec<DerivedKey>,
}

struct DerivedKey {
    id: KeyId,
    seal: LessSafeKey,
    sign: hmac::Key,
    mac: hmac::Key,
}

impl DerivedKey {
    fn derive(secret: &str) -> anyhow::Result<Self> {
        let root = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
        let purpose = |name: &str| hmac::sign(&root, format!("throughline/{name}/v1").as_bytes());
        let mut id = [0; KEY_ID_LEN];
        id.copy_from_slice(&purpose("id").as_ref()[..KEY_ID_LEN]);
        let seal = UnboundKey::new(&AES_256_GCM, purpose("seal").as_ref())
            .map_err(|_| anyhow::anyhow!("a derived key has the wrong length"))?;
        Ok(Self {
            id,
            seal: LessSafeKey::new(seal),
            sign: hmac::Key::new(hmac::HMAC_SHA256, purpose("sign").as_ref()),
            mac: hmac::Key::new(hmac::HMAC_SHA256, purpose("mac").as_ref()),
        })
    }

    fn associated_data(&self, context: &str) -> Aad<Vec<u8>> {
        let mut bytes = vec![VERSION];
        bytes.extend_from_slice(&self.id);
        bytes.extend_from_slice(context.as_bytes());
        Aad::from(bytes)
    }
}

impl Keyring {
    /// `secrets` must not be empty: configuration has checked it.
    pub fn new(secrets: &[SecretString]) -> anyhow::Result<Self> {
        anyhow::ensure!(!secrets.is_empty(), "no secret key");
        let keys = secrets
            .iter()
            .map(|secret| DerivedKey::derive(secret.expose_secret()))
            .collect::<Result<_, _>>()?;
        Ok(Self { keys })
    }

    /// The first is the one that seals and signs.
    pub fn key_ids(&self) -> impl Iterator<Item = &KeyId> {
        self.keys.iter().map(|key| &key.id)
    }

    pub fn first_id(&self) -> KeyId {
        self.first().id
    }

    fn first(&self) -> &DerivedKey {
        &self.keys[0]
    }

    /// Encrypts for `context`: version, key id, nonce, ciphertext and tag.
    pub fn seal(&self, context: &str, plain: &[u8]) -> anyhow::Result<Vec<u8>> {
        let key = self.first();
        let nonce: [u8; NONCE_LEN] = random()?;
        let mut sealed = Vec::with_capacity(HEADER_LEN + plain.len() + AES_256_GCM.tag_len());
        sealed.push(VERSION);
        sealed.extend_from_slice(&key.id);
        sealed.extend_from_slice(&nonce);
        let mut body = plain.to_vec();
        key.seal
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                key.associated_data(context),
                &mut body,
            )
            .map_err(|_| anyhow::anyhow!("sealing failed"))?;
        sealed.append(&mut body);
        Ok(sealed)
    }

    pub fn open(&self, context: &str, sealed: &[u8]) -> Result<Vec<u8>, OpenError> {
        let (header, body) = sealed.split_at_checked(HEADER_LEN).ok_or(OpenError)?;
        let (version, rest) = header.split_first().ok_or(OpenError)?;
        let (id, nonce) = rest.split_at(KEY_ID_LEN);
        if *version != VERSION {
            return Err(OpenError);
        }
        let key = self.keys.iter().find(|key| key.id == id).ok_or(OpenError)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| OpenError)?;
        let mut body = body.to_vec();
        let plain = key
            .seal
            .open_in_place(nonce, key.associated_data(context), &mut body)
            .map_err(|_| OpenError)?;
        Ok(plain.to_vec())
    }

    /// Signs `message` for `context` with the newest key.
    pub fn sign(&self, context: &str, message: &[u8]) -> [u8; SIGNATURE_LEN] {
        signature_of(self.first(), context, message)
    }

    /// True if any of the keys signed `message` for `context`.
    pub fn verify(&self, context: &str, message: &[u8], signature: &[u8]) -> bool {
        self.keys
            .iter()
            .any(|key| constant_time_eq(&signature_of(key, context, message), signature))
    }

    /// Marks this deployment's outgoing calls. Another deployment has other keys.
    pub fn hop_mark(&self) -> String {
        hex::encode(self.sign("hop", b""))
    }

    pub fn is_own_hop_mark(&self, mark: &str) -> bool {
        hex::decode(mark).is_ok_and(|mark| self.verify("hop", b"", &mark))
    }

    /// A full-length tag of `message` for `context`, by the newest key.
    pub fn mac(&self, context: &str, message: &[u8]) -> Mac {
        let key = self.first();
        Mac {
            key_id: key.id,
            tag: tag(&key.mac, context, message),
        }
    }

    /// The tags of `message` under every key, to look up a stored one.
    pub fn every_mac(&self, context: &str, message: &[u8]) -> Vec<Vec<u8>> {
        let tag_by = |key: &DerivedKey| tag::<MAC_LEN>(&key.mac, context, message).to_vec();
        self.keys.iter().map(tag_by).collect()
    }

    /// Checks that the key `key_id` made `mac` of `message` for `context`.
    pub fn check_mac(
        &self,
        context: &str,
        message: &[u8],
        key_id: &[u8],
        mac: &[u8],
    ) -> Result<(), BadMac> {
        let key = self.keys.iter().find(|key| key.id == key_id);
        let key = key.ok_or(BadMac::UnknownKey)?;
        let expected: [u8; MAC_LEN] = tag(&key.mac, context, message);
        if constant_time_eq(&expected, mac) {
            Ok(())
        } else {
            Err(BadMac::Wrong)
        }
    }
}

fn signature_of(key: &DerivedKey, context: &str, message: &[u8]) -> [u8; SIGNATURE_LEN] {
    tag(&key.sign, context, message)
}

/// The first `N` bytes of an HMAC; `N` is at most 32.
fn tag<const N: usize>(key: &hmac::Key, context: &str, message: &[u8]) -> [u8; N] {
    let mut signing = hmac::Context::with_key(key);
    // The length separates the two: no context and message can be read as another pair.
    signing.update(&(context.len() as u64).to_be_bytes());
    signing.update(context.as_bytes());
    signing.update(message);
    let mut out = [0; N];
    out.copy_from_slice(&signing.sign().as_ref()[..N]);
    out
}

pub fn constant_time_eq(a: &[u8], b: &[u8]) -> bool {
    constant_time::verify_slices_are_equal(a, b).is_ok()
}

pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    out
}

/// SHA-256 of data in pieces.
pub struct Hasher(digest::Context);

impl Hasher {
    pub fn new() -> Self {
        Self(digest::Context::new(&digest::SHA256))
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish(self) -> [u8; 32] {
        let mut out = [0; 32];
        out.copy_from_slice(self.0.finish().as_ref());
        out
    }
}

impl Default for Hasher {
    fn default() -> Self {
        Self::new()
    }
}

pub fn random<const N: usize>() -> anyhow::Result<[u8; N]> {
    let mut bytes = [0; N];
    rand::fill(&mut bytes).map_err(|_| anyhow::anyhow!("no randomness"))?;
    Ok(bytes)
}

/// A secret for people to copy: 32 random bytes as 44 base62 digits.
pub fn random_secret() -> anyhow::Result<String> {
    let bytes: [u8; 32] = random()?;
    let (high, low) = bytes.split_at(16);
    let number = |half: &[u8]| u128::from_be_bytes(half.try_into().unwrap_or_default());
    Ok(format!(
        "{}{}",
        base62(number(high), 22),
        base62(number(low), 22)
    ))
}

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// `number` in base 62, padded to `width` digits; 22 hold any u128.
pub fn base62(mut number: u128, width: usize) -> String {
    let mut digits = vec![b'0'; width];
    for digit in digits.iter_mut().rev() {
        *digit = DIGITS[(number % 62) as usize];
        number /= 62;
    }
    digits.into_iter().map(char::from).collect()
}

/// The number that `text` spells in base 62; `None` on any other character or past 128 bits.
pub fn parse_base62(text: &str) -> Option<u128> {
    text.bytes().try_fold(0u128, |number, byte| {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'A'..=b'Z' => byte - b'A' + 10,
            b'a'..=b'z' => byte - b'a' + 36,
            _ => return None,
        };
        number.checked_mul(62)?.checked_add(digit.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(secrets: &[&str]) -> Keyring {
        let secrets: Vec<SecretString> = secrets.iter().map(|s| (*s).into()).collect();
        Keyring::new(&secrets).unwrap()
    }

    const OLD: &str = "an old secret of more than thirty-two characters";
    const NEW: &str = "a new secret of more than thirty-two characters!";

    #[test]
    fn what_is_sealed_opens_only_in_its_context() {
        let ring = ring(&[OLD]);
        let sealed = ring.seal("tenant a", b"text").unwrap();
        assert_eq!(ring.open("tenant a", &sealed).unwrap(), b"text");
        assert_eq!(ring.open("tenant b", &sealed), Err(OpenError));
        for index in 0..sealed.len() {
            let mut damaged = sealed.clone();
            damaged[index] ^= 1;
            assert_eq!(
                ring.open("tenant a", &damaged),
                Err(OpenError),
                "byte {index}"
            );
        }
        assert_eq!(ring.open("tenant a", &sealed[..5]), Err(OpenError));
    }

    #[test]
    fn a_key_is_rotated_by_putting_a_new_one_in_front() {
        let old = ring(&[OLD]);
        let both = ring(&[NEW, OLD]);
        let new = ring(&[NEW]);
        let sealed = old.seal("c", b"text").unwrap();
        let signature = old.sign("c", b"text");
        assert_eq!(both.open("c", &sealed).unwrap(), b"text");
        assert!(both.verify("c", b"text", &signature));
        assert_eq!(new.open("c", &sealed), Err(OpenError));
        assert!(!new.verify("c", b"text", &signature));
        assert!(new.open("c", &both.seal("c", b"x").unwrap()).is_ok());
    }

    #[test]
    fn a_signature_is_bound_to_context_and_message() {
        let ring = ring(&[OLD]);
        let signature = ring.sign("ab", b"c");
        assert!(ring.verify("ab", b"c", &signature));
        assert!(!ring.verify("a", b"bc", &signature));
        assert!(!ring.verify("ab", b"c", &signature[..8]));
    }

    #[test]
    fn a_mac_names_its_key_and_outlives_a_rotation() {
        let made = ring(&[OLD]).mac("c", b"text");
        let check = |ring: &Keyring, context: &str, message: &[u8]| {
            ring.check_mac(context, message, &made.key_id, &made.tag)
        };
        let both = ring(&[NEW, OLD]);
        assert_eq!(check(&both, "c", b"text"), Ok(()));
        assert_eq!(check(&both, "c", b"test"), Err(BadMac::Wrong));
        assert_eq!(check(&both, "d", b"text"), Err(BadMac::Wrong));
        assert_eq!(check(&ring(&[NEW]), "c", b"text"), Err(BadMac::UnknownKey));
        let newest = both.mac("c", b"text");
        assert_ne!(newest.key_id, made.key_id);
        let mixed = both.check_mac("c", b"text", &newest.key_id, &made.tag);
        assert_eq!(mixed, Err(BadMac::Wrong));
    }

    #[test]
    fn a_hash_does_not_tell_how_its_text_was_cut() {
        let mut hasher = Hasher::new();
        for piece in [&b"ab"[..], b"", b"c"] {
            hasher.update(piece);
        }
        assert_eq!(hasher.finish(), sha256(b"abc"));
    }

    #[test]
    fn base62_holds_every_number() {
        for number in [0, 61, 62, u128::from(u64::MAX), u128::MAX] {
            assert_eq!(parse_base62(&base62(number, 22)), Some(number));
        }
        assert_eq!(parse_base62("zzzzzzzzzzzzzzzzzzzzzz"), None);
        assert_eq!(parse_base62("a-b"), None);
        for (value, digit) in DIGITS.iter().enumerate() {
            let text = char::from(*digit).to_string();
            assert_eq!(parse_base62(&text), Some(value as u128));
        }
    }
}
