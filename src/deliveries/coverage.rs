//! Which platforms' deliveries a key sees.

use crate::auth::KeyCaller;
use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::api_key::Scope;
use crate::error::{Code, Error, Result};
use crate::store::bridge::deliveries::CoveredPlatforms;

/// What a key may lease and end, narrowed to the platform that it names.
pub fn served(key: &KeyCaller, named: Option<&PlatformScope>) -> Result<CoveredPlatforms> {
    let serves_all = key.has_scope(Scope::Admin);
    let Some(named) = named else {
        return Ok(if serves_all {
            CoveredPlatforms::all()
        } else {
            CoveredPlatforms::of(key.platforms())
        });
    };
    let covers = |own: &PlatformScope| own.covers(named.platform(), named.scope());
    if serves_all || key.platforms().iter().any(covers) {
        return Ok(CoveredPlatforms::of(std::slice::from_ref(named)));
    }
    // A platform whose workspaces it serves in part is narrowed to those.
    let parts: Vec<PlatformScope> = key
        .platforms()
        .iter()
        .filter(|own| named.covers(own.platform(), own.scope()))
        .cloned()
        .collect();
    if parts.is_empty() {
        let detail = "the key does not serve this platform";
        return Err(Error::new(Code::PlatformNotAllowed, detail));
    }
    Ok(CoveredPlatforms::of(&parts))
}

/// What a key may list.
pub fn readable(key: &KeyCaller) -> CoveredPlatforms {
    if key.has_scope(Scope::Admin) || key.has_scope(Scope::Read) {
        CoveredPlatforms::all()
    } else {
        CoveredPlatforms::of(key.platforms())
    }
}
