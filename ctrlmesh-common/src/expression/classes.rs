//! Which classes of Unicode's has Go? The crate `regex` has more: properties, and scripts by their short names.

/// Categories, their long names and scripts: small letters, and what may stand between words left out. Surrogates are
/// missing, because no text has any.
const NAMES: &str = "\
    adlam ahom anatolianhieroglyphs any arabic armenian ascii assigned avestan balinese bamum \
    bassavah batak bengali bhaiksuki bopomofo brahmi braille buginese buhid c canadianaboriginal \
    carian casedletter caucasianalbanian cc cf chakma cham cherokee chorasmian closepunctuation \
    cn cntrl co combiningmark common connectorpunctuation control coptic cuneiform \
    currencysymbol cypriot cyprominoan cyrillic dashpunctuation decimalnumber deseret devanagari \
    digit divesakuru dogra duployan egyptianhieroglyphs elbasan elymaic enclosingmark ethiopic \
    finalpunctuation format georgian glagolitic gothic grantha greek gujarati gunjalagondi \
    gurmukhi han hangul hanifirohingya hanunoo hatran hebrew hiragana imperialaramaic inherited \
    initialpunctuation inscriptionalpahlavi inscriptionalparthian javanese kaithi kannada \
    katakana kawi kayahli kharoshthi khitansmallscript khmer khojki khudawadi l lao latin lc \
    lepcha letter letternumber limbu lineara linearb lineseparator lisu ll lm lo lowercaseletter \
    lt lu lycian lydian m mahajani makasar malayalam mandaic manichaean marchen mark \
    masaramgondi mathsymbol mc me medefaidrin meeteimayek mendekikakui meroiticcursive \
    meroitichieroglyphs miao mn modi modifierletter modifiersymbol mongolian mro multani myanmar \
    n nabataean nagmundari nandinagari nd newa newtailue nko nl no nonspacingmark number nushu \
    nyiakengpuachuehmong ogham olchiki oldhungarian olditalic oldnortharabian oldpermic \
    oldpersian oldsogdian oldsoutharabian oldturkic olduyghur openpunctuation oriya osage \
    osmanya other otherletter othernumber otherpunctuation othersymbol p pahawhhmong palmyrene \
    paragraphseparator paucinhau pc pd pe pf phagspa phoenician pi po privateuse ps \
    psalterpahlavi punct punctuation rejang runic s samaritan saurashtra sc separator sharada \
    shavian siddham signwriting sinhala sk sm so sogdian sorasompeng soyombo spaceseparator \
    spacingmark sundanese sylotinagri symbol syriac tagalog tagbanwa taile taitham taiviet takri \
    tamil tangsa tangut telugu thaana thai tibetan tifinagh tirhuta titlecaseletter toto \
    ugaritic unassigned uppercaseletter vai vithkuqi wancho warangciti yezidi yi z \
    zanabazarsquare zl zp zs";

/// Whether `name` is that of a class, small and capital letters alike.
pub(super) fn is_known(name: &str) -> bool {
    let between = |one: &char| !matches!(one, ' ' | '_' | '-');
    let name: String = name.chars().filter(between).map(|one| one.to_ascii_lowercase()).collect();
    NAMES.split(' ').any(|known| known == name)
}
