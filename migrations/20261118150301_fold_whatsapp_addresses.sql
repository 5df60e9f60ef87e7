-- An account on WhatsApp is found by its number, also where a bridge gives the address that WhatsApp's servers use
-- (`4930:7@s.whatsapp.net`): version 2 of the normalisation. A number that has an account of its own already keeps
-- it, and the other stays as it is: accounts are joined by people alone. What was said under the old key of a folded
-- address stays listed and can be gone on with.
set local lock_timeout = '5s';

alter table identities no force row level security;
update identities i
   set external_id = f.number,
       normalisation = 2
  from (select tenant_id, scope, number, min(id::text)::uuid as id
          from (select tenant_id, id, scope, external_id,
                       regexp_replace(regexp_replace(external_id, '(:[0-9]*)?@(s[.]whatsapp[.]net|c[.]us)$', ''),
                                      '[^0-9]', '', 'g') as number
                  from identities
                 where platform = 'whatsapp'
                   and external_id ~ '^[+]?[0-9 .()-]*[0-9][0-9 .()-]*(:[0-9]*)?@(s[.]whatsapp[.]net|c[.]us)$') a
         group by tenant_id, scope, number) f
 where i.tenant_id = f.tenant_id
   and i.id = f.id
   and not exists (select 1
                     from identities o
                    where o.tenant_id = f.tenant_id
                      and o.platform = 'whatsapp'
                      and o.scope = f.scope
                      and o.external_id = f.number);
alter table identities force row level security;
