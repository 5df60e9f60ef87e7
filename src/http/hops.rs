//! Refuses a request that has passed through this service before. Otherwise an agent whose model is the service itself,
//! behind any number of proxies, would call itself without end. Calls of models carry a mark of this deployment.

use actix_web::http::header::HeaderMap;

use crate::crypto::Keyring;
use crate::domain::tenant::hop;
use crate::error::{Code, Error, Result};

pub fn check(headers: &HeaderMap, keyring: &Keyring) -> Result<()> {
    let is_ours = |mark: &str| keyring.is_own_hop_mark(mark);
    let marks = headers
        .get_all(hop::HEADER)
        .filter_map(|mark| mark.to_str().ok());
    let mut marks = marks.flat_map(|marks| marks.split(',').map(str::trim));
    if marks.any(is_ours) {
        let detail = "an agent's model leads back to this service";
        return Err(Error::new(Code::LoopDetected, detail));
    }
    Ok(())
}
